/* The floor: what forwarding costs when nothing is decided.
 *
 *     floor LISTEN-PORT UPSTREAM-PORT [single]
 *
 * An epoll loop, one socket for clients and one connected to the upstream, both on 127.0.0.1. Queries get an ID of
 * our own, answers the client's again; there is no other logic: no check of question or source, no deadline, no TCP.
 * Up to 64 datagrams move per system call (recvmmsg, sendmmsg), as in the proxy; with `single` it is one per call
 * (recvfrom, sendto), as in most forwarders.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define BATCH 64
#define SIZE 4096

struct asked { struct sockaddr_in client; uint16_t id; };

static struct asked in_flight[65536];
static uint16_t next_id;
static unsigned char data[BATCH][SIZE];
static struct sockaddr_in peers[BATCH];
static struct iovec parts[BATCH];
static struct mmsghdr messages[BATCH];

static int udp(int port, int connected)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int room = 4 << 20;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    if ((connected ? connect : bind)(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("floor");
        exit(1);
    }
    return fd;
}

/* Give a query an ID of ours, and note whose it is. */
static void outward(unsigned char *wire, const struct sockaddr_in *client)
{
    struct asked *asked = &in_flight[++next_id];
    asked->client = *client;
    memcpy(&asked->id, wire, 2);
    memcpy(wire, &next_id, 2);
}

/* Give an answer the client's ID, and say where it goes. */
static void homeward(unsigned char *wire, struct sockaddr_in *client)
{
    uint16_t id;
    memcpy(&id, wire, 2);
    *client = in_flight[id].client;
    memcpy(wire, &in_flight[id].id, 2);
}

static void batched(int from, int to, int home)
{
    for (int at = 0; at < BATCH; at++) {
        parts[at] = (struct iovec){data[at], SIZE};
        messages[at].msg_hdr = (struct msghdr){
            .msg_iov = &parts[at], .msg_iovlen = 1,
            .msg_name = home ? NULL : &peers[at], .msg_namelen = home ? 0 : sizeof peers[at]};
    }
    int count = recvmmsg(from, messages, BATCH, 0, NULL);
    for (int at = 0; at < count; at++) {
        parts[at].iov_len = messages[at].msg_len;
        if (home)
            homeward(data[at], &peers[at]);
        else
            outward(data[at], &peers[at]);
        messages[at].msg_hdr.msg_name = home ? &peers[at] : NULL;
        messages[at].msg_hdr.msg_namelen = home ? sizeof peers[at] : 0;
    }
    for (int sent = 0, taken; sent < count; sent += taken > 0 ? taken : 1)
        taken = sendmmsg(to, messages + sent, count - sent, 0);
}

static void single(int from, int to, int home)
{
    struct sockaddr_in peer;
    for (int turn = 0; turn < BATCH; turn++) {
        socklen_t size = sizeof peer;
        ssize_t length = recvfrom(from, data[0], SIZE, 0, home ? NULL : (struct sockaddr *)&peer, home ? NULL : &size);
        if (length < 2)
            return;
        if (home)
            homeward(data[0], &peer);
        else
            outward(data[0], &peer);
        sendto(to, data[0], length, 0, home ? (struct sockaddr *)&peer : NULL, home ? sizeof peer : 0);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "floor LISTEN-PORT UPSTREAM-PORT [single]\n");
        return 2;
    }
    int clients = udp(atoi(argv[1]), 0), upstream = udp(atoi(argv[2]), 1), loop = epoll_create1(0);
    void (*move)(int, int, int) = argc > 3 && !strcmp(argv[3], "single") ? single : batched;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = clients}, ready[2];
    epoll_ctl(loop, EPOLL_CTL_ADD, clients, &event);
    event.data.fd = upstream;
    epoll_ctl(loop, EPOLL_CTL_ADD, upstream, &event);
    for (;;) {
        int count = epoll_wait(loop, ready, 2, -1);
        for (int at = 0; at < count; at++)
            if (ready[at].data.fd == clients)
                move(clients, upstream, 0);
            else
                move(upstream, clients, 1);
    }
}
