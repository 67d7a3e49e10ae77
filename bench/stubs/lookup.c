/* One getaddrinfo call: its outcome and how long it took. Built against glibc and against musl. */
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>
#include <time.h>

int main(int argc, char **argv) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    struct timespec start, end;
    int addresses = 0;
    if (argc != 2) return 2;
    clock_gettime(CLOCK_MONOTONIC, &start);
    int error = getaddrinfo(argv[1], "443", &hints, &found);
    clock_gettime(CLOCK_MONOTONIC, &end);
    for (struct addrinfo *at = found; at; at = at->ai_next) addresses++;
    double ms = (end.tv_sec - start.tv_sec) * 1e3 + (end.tv_nsec - start.tv_nsec) / 1e6;
    printf("%s, %d addresses, %.0f ms\n", error ? gai_strerror(error) : "ok", addresses, ms);
    return 0;
}
