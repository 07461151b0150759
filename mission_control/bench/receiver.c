/* The least that moves an object over TCP: a sender that writes from memory, a receiver that reads into memory.
 *
 * receiver serve CC [mptcp]                                       prints its port, then sends what it is asked for
 * receiver fetch PORT BYTES FLOWS ROUNDS KIND CC [mptcp]          prints one line per round: seconds
 *
 * A request is where the range starts and how long it is, eight bytes each in host order. With F flows each thread takes
 * an equal part of the object on a connection of its own. KIND is "reused"; "fresh", which maps new memory (huge pages
 * advised) for each object; or "read", which adds up the words that arrived, as whoever verifies bytes must read them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

enum { FLOWS_MAX = 64 };
static const size_t CONTENT = 256u << 20;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static char *memory(size_t bytes) {
    char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) fail("mmap");
    madvise(start, bytes, MADV_HUGEPAGE);
    return start;
}

static char *content;

struct range {
    uint64_t start, bytes;
};

static void *serve_one(void *argument) {
    int fd = (int)(intptr_t)argument;
    struct range range;
    while (recv(fd, &range, sizeof range, MSG_WAITALL) == sizeof range) {
        for (uint64_t sent = 0; sent < range.bytes;) {
            ssize_t count = send(fd, content + range.start + sent, range.bytes - sent, MSG_NOSIGNAL);
            if (count <= 0) break;
            sent += count;
        }
    }
    close(fd);
    return NULL;
}

static int protocol;

static int serve(const char *cc) {
    content = memory(CONTENT);
    memset(content, 7, CONTENT);
    int listener = socket(AF_INET, SOCK_STREAM, protocol);
    setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, cc, strlen(cc));
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    if (bind(listener, (void *)&address, len) || listen(listener, 64)) fail("listen");
    getsockname(listener, (void *)&address, &len);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) fail("accept");
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        pthread_t thread;
        pthread_create(&thread, NULL, serve_one, (void *)(intptr_t)fd);
        pthread_detach(thread);
    }
}

static int reads;
static uint64_t sum;

static void add_up(const char *bytes, size_t count) {
    uint64_t a = 0, b = 0, word[2];
    for (size_t i = 0; i + sizeof word <= count; i += sizeof word) {
        memcpy(word, bytes + i, sizeof word);
        a += word[0];
        b += word[1];
    }
    __atomic_fetch_add(&sum, a + b, __ATOMIC_RELAXED);
}

struct part {
    int fd;
    char *into;
    struct range range;
};

static void *receive(void *argument) {
    struct part *part = argument;
    if (send(part->fd, &part->range, sizeof part->range, 0) != sizeof part->range) fail("send");
    for (uint64_t got = 0; got < part->range.bytes;) {
        ssize_t count = recv(part->fd, part->into + got, part->range.bytes - got, 0);
        if (count <= 0) fail("recv");
        if (reads) add_up(part->into + got, count);
        got += count;
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (!strcmp(argv[argc - 1], "mptcp")) {
        protocol = IPPROTO_MPTCP;
        argc--;
    }
    if (argc == 3 && !strcmp(argv[1], "serve")) return serve(argv[2]);
    if (argc != 8) return 2;
    int port = atoi(argv[2]), flows = atoi(argv[4]), rounds = atoi(argv[5]);
    uint64_t bytes = strtoull(argv[3], NULL, 10);
    int fresh = !strcmp(argv[6], "fresh");
    reads = !strcmp(argv[6], "read");
    struct part parts[FLOWS_MAX];
    for (int i = 0; i < flows; i++) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int one = 1;
        parts[i].fd = socket(AF_INET, SOCK_STREAM, protocol);
        setsockopt(parts[i].fd, IPPROTO_TCP, TCP_CONGESTION, argv[7], strlen(argv[7]));
        setsockopt(parts[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (connect(parts[i].fd, (void *)&address, sizeof address)) fail("connect");
    }
    char *into = memory(bytes);
    memset(into, 1, bytes);
    for (int round = -1; round < rounds; round++) { /* the first warms up */
        double began = now();
        if (fresh) into = memory(bytes);
        pthread_t threads[FLOWS_MAX];
        for (int i = 0; i < flows; i++) {
            uint64_t start = bytes * i / flows;
            parts[i].into = into + start;
            parts[i].range = (struct range){start, bytes * (i + 1) / flows - start};
            if (i) pthread_create(&threads[i], NULL, receive, &parts[i]);
        }
        receive(&parts[0]);
        for (int i = 1; i < flows; i++) pthread_join(threads[i], NULL);
        double seconds = now() - began;
        if (fresh) munmap(into, bytes);
        if (round >= 0) printf("%.9f\n", seconds);
    }
    return 0;
}
