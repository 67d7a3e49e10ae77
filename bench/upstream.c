/* A name server that makes its answers up, for what a zone file cannot say.
 *
 *     upstream PORT [DELAY-MS [POOL]]
 *
 * The first label is a letter and a number: nN... has two addresses that follow from N, of 20.0.0.0/7. pN... has eight
 * of a pool of POOL (2,000) addresses of 24.0.0.0/7, the next eight at every question, with a TTL of 5 s, as large
 * object stores do it. Every answer leaves DELAY-MS after its question (0). Anything else has two addresses, too.
 * UDP over 127.0.0.1; queries are answered up to 64 per system call, waiting ones in the order in which they came.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define BATCH 64
#define SIZE 512
#define WAITING 65536
#define NAMES 1024
#define ROTATED 8

struct answer { struct sockaddr_in client; int64_t due; int length; unsigned char wire[SIZE]; };

static struct answer waiting[WAITING];
static unsigned first, last; /* of those that wait, modulo WAITING */
static unsigned turn[NAMES];
static unsigned pool = 2000;
static int64_t delay;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Return the octets of the question including header, or 0 if it is none. */
static int question(const unsigned char *wire, int length)
{
    int at = 12;
    if (length < 17 || wire[2] & 0x80)
        return 0;
    while (at < length && wire[at])
        at += wire[at] + 1;
    return at + 5 <= length ? at + 5 : 0;
}

static unsigned char *record(unsigned char *at, uint32_t ttl, uint32_t address)
{
    static const unsigned char head[] = {0xc0, 12, 0, 1, 0, 1};
    uint16_t size = htons(4);
    ttl = htonl(ttl);
    address = htonl(address);
    memcpy(at, head, 6);
    memcpy(at + 6, &ttl, 4);
    memcpy(at + 10, &size, 2);
    memcpy(at + 12, &address, 4);
    return at + 16;
}

/* Write the answer over a query; return its length, or 0 for silence. */
static int answered(unsigned char *wire, int length)
{
    int end = question(wire, length), count;
    unsigned char *at = wire + end;
    char digits[64] = "";
    if (!end)
        return 0;
    memcpy(digits, wire + 14, wire[12] > 1 ? wire[12] - 1 : 0);
    uint32_t number = strtoul(digits, NULL, 10);
    if ((wire[13] | 32) == 'p') {
        unsigned *next = &turn[number % NAMES];
        for (count = 0; count < ROTATED; count++, *next = (*next + 1) % pool)
            at = record(at, 5, 0x18000000 + number % NAMES * pool + *next);
    } else {
        for (count = 0; count < 2; count++)
            at = record(at, 60, 0x14000000 + 2 * number + count);
    }
    wire[2] = 0x84 | (wire[2] & 1);
    wire[3] = 0;
    memset(wire + 6, 0, 6);
    wire[7] = count;
    return at - wire;
}

static void receive(int fd)
{
    static struct iovec parts[BATCH];
    static struct mmsghdr messages[BATCH];
    unsigned room = WAITING - (last - first);
    int limit = room < BATCH ? room : BATCH;
    for (int at = 0; at < limit; at++) {
        struct answer *answer = &waiting[(last + at) % WAITING];
        parts[at] = (struct iovec){answer->wire, SIZE - (ROTATED + 1) * 16};
        messages[at].msg_hdr = (struct msghdr){.msg_iov = &parts[at], .msg_iovlen = 1,
                                               .msg_name = &answer->client, .msg_namelen = sizeof answer->client};
    }
    int count = recvmmsg(fd, messages, limit, MSG_DONTWAIT, NULL);
    int64_t due = now() + delay;
    for (int at = 0; at < count; at++) {
        struct answer *answer = &waiting[(last + at) % WAITING];
        answer->due = due;
        answer->length = answered(answer->wire, messages[at].msg_len);
    }
    last += count > 0 ? count : 0;
}

static void send_due(int fd)
{
    static struct iovec parts[BATCH];
    static struct mmsghdr messages[BATCH];
    int64_t time = now();
    while (first != last && waiting[first % WAITING].due <= time) {
        int count = 0, sent;
        for (; count < BATCH && first != last && waiting[first % WAITING].due <= time; first++) {
            struct answer *answer = &waiting[first % WAITING];
            if (!answer->length)
                continue;
            parts[count] = (struct iovec){answer->wire, answer->length};
            messages[count].msg_hdr = (struct msghdr){.msg_iov = &parts[count], .msg_iovlen = 1,
                                                      .msg_name = &answer->client,
                                                      .msg_namelen = sizeof answer->client};
            count++;
        }
        for (int done = 0; done < count; done += sent > 0 ? sent : 1)
            sent = sendmmsg(fd, messages + done, count - done, 0);
    }
}

/* Return for how many milliseconds nothing is due; -1 for as long as nothing comes. */
static int patience(void)
{
    if (first == last)
        return -1;
    int64_t left = waiting[first % WAITING].due - now();
    return left <= 0 ? 0 : left / 1000000 + 1;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "upstream PORT [DELAY-MS [POOL]]\n");
        return 2;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    int room = 8 << 20, fd = socket(AF_INET, SOCK_DGRAM, 0);
    delay = argc > 2 ? atoi(argv[2]) * 1000000LL : 0;
    if (argc > 3)
        pool = atoi(argv[3]);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    if (bind(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("upstream");
        return 1;
    }
    for (struct pollfd wait = {.fd = fd, .events = POLLIN};;) {
        poll(&wait, 1, patience());
        receive(fd);
        send_due(fd);
    }
}
