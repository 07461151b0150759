/* Gives an unchanged program Multipath TCP: every TCP socket that it makes asks for it (RFC 8684), and falls back to plain TCP
 * where the kernel or the peer has none. What became of each connection is written to the file MISSION_EXEC_REPORT when its
 * socket is closed: the number of its subflows, or 0 where it fell back. Loaded ahead of the C library (ld.so(8), LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define IPPROTO_TCP 6
#define IPPROTO_MPTCP 262
#define SOL_MPTCP 284
#define MPTCP_INFO 1
/* linux/mptcp.h, struct mptcp_info: further subflows at 0, flags at 8, all subflows (since 6.6) at 80. */
#define FURTHER 0
#define FLAGS 8
#define ALL 80
#define FELL_BACK 1

#define SOCKETS_MAX 65536
/* By descriptor: the process whose socket asked for Multipath TCP; children have copies, and do not report them. */
static pid_t ours[SOCKETS_MAX];

static void tell(int fd)
{
    unsigned char info[256] = {0};
    socklen_t len = sizeof info, name_len = sizeof(struct sockaddr_storage);
    struct sockaddr_storage peer;
    const char *path = getenv("MISSION_EXEC_REPORT");
    char line[32];
    int report, subflows = 0, before = errno;

    ours[fd] = 0;
    /* Only connected sockets are reported. */
    if (path && getpeername(fd, (struct sockaddr *)&peer, &name_len) == 0) {
        if (getsockopt(fd, SOL_MPTCP, MPTCP_INFO, info, &len) == 0 && !(info[FLAGS] & FELL_BACK))
            subflows = len > ALL ? info[ALL] : info[FURTHER] + 1;
        report = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (report >= 0) {
            int written = snprintf(line, sizeof line, "%d\n", subflows);
            if (write(report, line, written) < 0)
                errno = before;
            static int (*next)(int);
            if (!next)
                next = (int (*)(int))dlsym(RTLD_NEXT, "close");
            next(report);
        }
    }
    errno = before;
}

int socket(int domain, int type, int protocol)
{
    static int (*next)(int, int, int);
    if (!next)
        next = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    int stream = (type & 0xf) == SOCK_STREAM && (protocol == 0 || protocol == IPPROTO_TCP);
    if (stream && (domain == AF_INET || domain == AF_INET6)) {
        int fd = next(domain, type, IPPROTO_MPTCP);
        if (fd >= 0) {
            if (fd < SOCKETS_MAX)
                ours[fd] = getpid();
            return fd;
        }
    }
    int fd = next(domain, type, protocol);
    /* The C library may have closed a socket of this number without asking here. */
    if (fd >= 0 && fd < SOCKETS_MAX)
        ours[fd] = 0;
    return fd;
}

static int accepted(int fd, int from)
{
    if (fd >= 0 && fd < SOCKETS_MAX && from >= 0 && from < SOCKETS_MAX)
        ours[fd] = ours[from] ? getpid() : 0;
    return fd;
}

int accept(int from, struct sockaddr *address, socklen_t *len)
{
    static int (*next)(int, struct sockaddr *, socklen_t *);
    if (!next)
        next = (int (*)(int, struct sockaddr *, socklen_t *))dlsym(RTLD_NEXT, "accept");
    return accepted(next(from, address, len), from);
}

int accept4(int from, struct sockaddr *address, socklen_t *len, int flags)
{
    static int (*next)(int, struct sockaddr *, socklen_t *, int);
    if (!next)
        next = (int (*)(int, struct sockaddr *, socklen_t *, int))dlsym(RTLD_NEXT, "accept4");
    return accepted(next(from, address, len, flags), from);
}

int close(int fd)
{
    static int (*next)(int);
    if (!next)
        next = (int (*)(int))dlsym(RTLD_NEXT, "close");
    if (fd >= 0 && fd < SOCKETS_MAX && ours[fd] == getpid())
        tell(fd);
    return next(fd);
}

__attribute__((destructor)) static void tell_all(void)
{
    for (int fd = 0; fd < SOCKETS_MAX; fd++)
        if (ours[fd] && ours[fd] == getpid())
            tell(fd);
}
