/* Trivial engine for measuring routers, the compiled form of benchmarks/rig/mock_engine.py: answers every
 * completion at once. It reads HTTP/1.1 with Content-Length bodies on kept connections.
 *
 *     mock_engine PORT ANSWERS_FILE
 *
 * ANSWERS_FILE: five answers, each as its length (u64, this machine's order) and its bytes: the list of models,
 * then text and chat, each whole and as a stream.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REQUEST_BYTES = 1 << 20, EVENTS = 256, ANSWERS = 5 };

typedef struct {
    int socket;
    size_t length, room;
    char *request;
} Client;

static struct {
    uint64_t length;
    char *bytes;
} answers[ANSWERS];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void send_answer(int client, int number) {
    for (uint64_t sent = 0; sent < answers[number].length;) {
        ssize_t done = send(client, answers[number].bytes + sent, answers[number].length - sent, MSG_NOSIGNAL);
        if (done < 0 && errno != EINTR) return; /* the client has gone; its end arrives as an event */
        sent += done > 0 ? (uint64_t)done : 0;
    }
}

/* Return the bytes of the request at the beginning of the buffer; 0: it is incomplete. */
static size_t answer_one(Client *client) {
    char *end = memmem(client->request, client->length, "\r\n\r\n", 4);
    if (end == NULL) return 0;
    size_t body_at = (size_t)(end - client->request) + 4, body = 0;
    *end = 0;
    for (char *line = client->request; line != NULL; line = strstr(line, "\r\n")) {
        line += *line == '\r' ? 2 : 0;
        if (strncasecmp(line, "content-length:", 15) == 0) body = strtoul(line + 15, NULL, 10);
    }
    char *line_end = strstr(client->request, "\r\n");
    int chat = memmem(client->request, (size_t)((line_end ? line_end : end) - client->request), "/chat/", 6) != NULL;
    int get = strncasecmp(client->request, "get", 3) == 0;
    *end = '\r';
    if (client->length < body_at + body) return 0;
    const char *sent = client->request + body_at;
    int stream = memmem(sent, body, "\"stream\":true", 13) != NULL || memmem(sent, body, "\"stream\": true", 14) != NULL;
    send_answer(client->socket, get ? 0 : 1 + 2 * chat + stream);
    return body_at + body;
}

static void take(Client *client) {
    if (client->length + 1 >= client->room) {
        client->room = client->room ? 2 * client->room : 65536;
        if (client->room > REQUEST_BYTES) fail("a request is too long");
        client->request = realloc(client->request, client->room);
    }
    ssize_t got = recv(client->socket, client->request + client->length, client->room - client->length - 1, 0);
    if (got <= 0) {
        if (got < 0 && errno == EINTR) return;
        close(client->socket);
        free(client->request);
        free(client);
        return;
    }
    client->length += (size_t)got;
    for (size_t used; (used = answer_one(client)) > 0;) {
        client->length -= used;
        memmove(client->request, client->request + used, client->length);
    }
}

int main(int arguments, char **words) {
    if (arguments != 3) return 2;
    FILE *file = fopen(words[2], "rb");
    if (file == NULL) fail(words[2]);
    for (int at = 0; at < ANSWERS; at++) {
        if (fread(&answers[at].length, sizeof(uint64_t), 1, file) != 1) fail(words[2]);
        answers[at].bytes = malloc(answers[at].length);
        if (fread(answers[at].bytes, 1, answers[at].length, file) != answers[at].length) fail(words[2]);
    }
    fclose(file);
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0), ready = epoll_create1(0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, 4096) < 0) fail("listen");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(ready, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        struct epoll_event events[EVENTS];
        int found = epoll_wait(ready, events, EVENTS, -1);
        for (int at = 0; at < found; at++) {
            if (events[at].data.ptr != NULL) {
                take(events[at].data.ptr);
                continue;
            }
            int accepted = accept(listener, NULL, NULL);
            if (accepted < 0) continue;
            setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            Client *client = calloc(1, sizeof *client);
            client->socket = accepted;
            event.data.ptr = client;
            epoll_ctl(ready, EPOLL_CTL_ADD, accepted, &event);
        }
    }
}
