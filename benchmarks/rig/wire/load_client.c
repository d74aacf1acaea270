/* Closed-loop HTTP client on bare sockets, the compiled form of benchmarks/rig/load_client.py: each connection
 * sends its next request once the last answer is complete. Keep-alive, TCP_NODELAY, TCP_QUICKACK re-armed after
 * every read. Answers are checked for their status and their end, not parsed.
 *
 *     load_client PORT CONNECTIONS SECONDS REQUESTS_FILE
 *
 * REQUESTS_FILE: for each request its length (u64, this machine's order) and its bytes. On standard output, all
 * doubles: wall seconds, processor seconds, then for each answer the seconds to its first body byte, those to
 * its end, and its bytes. An answer other than 200 goes to standard error, and the exit status is 1.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER_BYTES = 1 << 20, EVENTS = 256 };

typedef struct {
    const char *bytes;
    uint64_t length;
} Request;

typedef struct {
    int socket;
    char *answer;
    size_t length, body_at, whole_at; /* 0: not known yet; whole_at 0: in chunks */
    double started, first;
} Caller;

typedef struct {
    double first, whole, size;
} Sample;

static Request *requests;
static size_t asked, count, answered, open_callers;
static Sample *samples;
static double until;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void ask(Caller *caller) {
    double at = now();
    if (asked == count || at >= until) {
        close(caller->socket);
        open_callers--;
        return;
    }
    const Request *request = &requests[asked++];
    caller->length = caller->body_at = caller->whole_at = 0;
    caller->first = 0;
    caller->started = at;
    for (uint64_t sent = 0; sent < request->length;) {
        ssize_t done = send(caller->socket, request->bytes + sent, request->length - sent, MSG_NOSIGNAL);
        if (done < 0 && errno != EINTR) fail("send");
        sent += done > 0 ? (uint64_t)done : 0;
    }
}

/* Read the head, once it is there. */
static bool read_head(Caller *caller) {
    char *end = memmem(caller->answer, caller->length, "\r\n\r\n", 4);
    if (end == NULL) return false;
    if (strncmp(caller->answer, "HTTP/1.1 200", 12) != 0) {
        fwrite(caller->answer, 1, caller->length, stderr);
        exit(1);
    }
    caller->body_at = (size_t)(end - caller->answer) + 4;
    *end = 0;
    for (char *line = caller->answer; line != NULL; line = strstr(line, "\r\n")) {
        line += *line == '\r' ? 2 : 0;
        if (strncasecmp(line, "content-length:", 15) == 0) {
            caller->whole_at = caller->body_at + strtoul(line + 15, NULL, 10);
            break;
        }
    }
    *end = '\r';
    return true;
}

static void take(Caller *caller) {
    ssize_t got = recv(caller->socket, caller->answer + caller->length, ANSWER_BYTES - caller->length, 0);
    if (got <= 0) {
        if (got < 0 && errno == EINTR) return;
        fprintf(stderr, "the server closed the connection before its answer was complete\n");
        exit(1);
    }
    int on = 1;
    setsockopt(caller->socket, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
    caller->length += (size_t)got;
    if (caller->length == ANSWER_BYTES) {
        fprintf(stderr, "an answer is longer than %d bytes\n", ANSWER_BYTES);
        exit(1);
    }
    if (!caller->body_at && !read_head(caller)) return;
    if (!caller->first && caller->length > caller->body_at) caller->first = now();
    bool whole = caller->whole_at
                     ? caller->length >= caller->whole_at
                     : caller->length >= 5 && memcmp(caller->answer + caller->length - 5, "0\r\n\r\n", 5) == 0;
    if (!whole) return;
    double at = now();
    samples[answered++] =
        (Sample){caller->first - caller->started, at - caller->started, (double)caller->length};
    ask(caller);
}

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) fail(path);
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(size + 1);
    if (bytes == NULL || fread(bytes, 1, size, file) != size) fail(path);
    fclose(file);
    requests = calloc(size / sizeof(uint64_t) + 1, sizeof *requests);
    for (size_t at = 0; at + sizeof(uint64_t) <= size; at += sizeof(uint64_t) + requests[count++].length) {
        memcpy(&requests[count].length, bytes + at, sizeof(uint64_t));
        requests[count].bytes = bytes + at + sizeof(uint64_t);
    }
    samples = calloc(count + 1, sizeof *samples);
}

int main(int arguments, char **words) {
    if (arguments != 5) return 2;
    load(words[4]);
    size_t callers = strtoul(words[2], NULL, 10);
    int ready = epoll_create1(0);
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Caller *all = calloc(callers, sizeof *all);
    for (size_t at = 0; at < callers; at++) {
        int on = 1, opened = socket(AF_INET, SOCK_STREAM, 0);
        if (opened < 0 || connect(opened, (struct sockaddr *)&server, sizeof server) < 0) fail("connect");
        setsockopt(opened, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        all[at] = (Caller){.socket = opened, .answer = malloc(ANSWER_BYTES + 1)};
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[at]};
        epoll_ctl(ready, EPOLL_CTL_ADD, opened, &event);
    }
    double began = now();
    until = began + atof(words[3]);
    open_callers = callers;
    for (size_t at = 0; at < callers; at++) ask(&all[at]);
    while (open_callers) {
        struct epoll_event events[EVENTS];
        int found = epoll_wait(ready, events, EVENTS, -1);
        for (int at = 0; at < found; at++) take(events[at].data.ptr);
    }
    double figures[2] = {now() - began, 0};
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    figures[1] = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    fwrite(figures, sizeof *figures, 2, stdout);
    fwrite(samples, sizeof *samples, answered, stdout);
    return 0;
}
