/* --connect and --join: the pipe between a client and an agent that serves on a socket. */
#include "agent.h"

#include <sys/socket.h>

enum { ROOM = 64 << 10 };

struct way {
	int from, to;
	bool as_text;
	size_t at, length;
	uint8_t bytes[ROOM];
};

/* As read(). As text it becomes longer. */
static ssize_t take(struct way *way) {
	uint8_t read_bytes[ROOM / 2];
	if (!way->as_text)
		return read(way->from, way->bytes, sizeof way->bytes);
	ssize_t n = read(way->from, read_bytes, sizeof read_bytes);
	return n <= 0 ? n : (ssize_t)line_of(way->bytes, read_bytes, (size_t)n);
}

/* Returns whether it goes on. */
static bool move(struct way *way, short from_events, short to_events) {
	ssize_t n = 1;
	errno = EAGAIN;
	if (way->length && to_events)
		n = write(way->to, way->bytes + way->at, way->length);
	else if (!way->length && from_events)
		n = take(way);
	else
		return true;
	if (n <= 0)
		return n < 0 && (errno == EAGAIN || errno == EINTR);
	way->at = way->length ? way->at + (size_t)n : 0;
	way->length = way->length ? way->length - (size_t)n : (size_t)n;
	return true;
}

static void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

/* An agent that hangs up may have said why: that is passed on before we end. */
static bool hear_out(struct way *to_agent) {
	bool refused = to_agent->length;
	to_agent->from = -1;
	to_agent->length = 0;
	return refused;
}

/* Until either end is at its end. Returns the exit status. */
int relay(const char *path, bool text) {
	struct way ways[2];
	int socket = connect_to(path);
	if (socket < 0) {
		fprintf(stderr, "hermitcrab-agent: nobody serves at %s: %s\n", path, strerror(errno));
		return 1;
	}
	signal(SIGPIPE, SIG_IGN);
	set_nonblocking(0);
	set_nonblocking(1);
	set_nonblocking(socket);
	ways[0] = (struct way){.from = 0, .to = socket};
	ways[1] = (struct way){.from = socket, .to = 1, .as_text = text};
	for (bool going = true; going;) {
		struct pollfd fds[4];
		for (int i = 0; i < 2; i++) {
			bool full = ways[i].length;
			fds[2 * i] = (struct pollfd){.fd = full ? -1 : ways[i].from, .events = POLLIN};
			fds[2 * i + 1] = (struct pollfd){.fd = full ? ways[i].to : -1, .events = POLLOUT};
		}
		if (poll(fds, 4, -1) < 0 && errno != EINTR)
			return 1;
		if (!move(&ways[0], fds[0].revents, fds[1].revents))
			going = hear_out(&ways[0]);
		going &= move(&ways[1], fds[2].revents, fds[3].revents);
	}
	return 0;
}
