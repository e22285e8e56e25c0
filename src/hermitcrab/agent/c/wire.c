/* The byte pipe to the client: frames in, frames out. */
#include "agent.h"

enum { READ_CHUNK = 64 << 10 };

bool sealed;
bool as_text;
int exit_status;

static struct {
	uint8_t bytes[sizeof(struct header) + MAX_PAYLOAD];
	size_t length;
	bool greeted, broken;    /* it sent its preamble; something malformed */
	bool lost;               /* of an agent that serves: this client is gone */
	int64_t lease, heard_at; /* the lease is 0 where there is none */
} in;

/*
 * Frames are gathered here and written once per turn of the loop. Bulk output does not pass through:
 * it waits in `middle`, a pipe of our own (nobody else can take bytes out of it, so a promised length
 * is kept), and belongs behind the first header of the queue.
 */
static struct {
	uint8_t *bytes;
	size_t at, length, room; /* `at` is sent; all is set back to 0 when everything is */
	int middle[2];
	size_t in_middle;
} out = {.middle = {-1, -1}};

/* With --text, what is being sent: the first `taken` bytes of the queue that are not sent yet. */
static struct {
	uint8_t bytes[2 * READ_CHUNK];
	size_t at, length, taken;
} text;

/* 0 when everything is sent. */
size_t queued(void) { return out.length; }

static uint8_t *reserve(size_t bytes) {
	if (out.length + bytes > out.room) {
		out.room = out.length + bytes + READ_CHUNK;
		out.bytes = must(realloc(out.bytes, out.room));
	}
	return out.bytes + out.length;
}

static void queue_header(uint8_t type, uint32_t id, uint8_t channel, size_t length) {
	struct header header = {.length = (uint32_t)length, .type = type, .channel = channel, .id = id};
	memcpy(reserve(sizeof header), &header, sizeof header);
	out.length += sizeof header;
}

static void queue_bytes(const void *bytes, size_t length) {
	if (length)
		memcpy(reserve(length), bytes, length);
	out.length += length;
}

void tell(uint8_t type, uint32_t id, uint8_t channel, const void *payload, size_t length) {
	if (sealed || !attached)
		return;
	queue_header(type, id, channel, length);
	queue_bytes(payload, length);
}

void greet(const void *hello, size_t length) {
	if (!serving) /* else it was sent before we knew who that is */
		queue_bytes(preamble, sizeof preamble);
	tell(TELL_HELLO, 0, 0, hello, length);
}

void protocol_error(const char *why) {
	if (in.broken)
		return;
	tell(TELL_ERROR, 0, 0, why, strlen(why));
	in.broken = true;
	if (serving)
		return; /* it costs the client its connection, see read_client, and nothing else */
	sealed = true;
	closing = true;
	exit_status = 3;
}

/* Nobody is there any more. */
static void end_connection(void) {
	if (serving)
		in.lost = true;
	else
		closing = true;
}

static void encode_text(const uint8_t *bytes, size_t length) {
	text.at = 0;
	text.taken = smaller(length, READ_CHUNK);
	text.length = line_of(text.bytes, bytes, text.taken);
}

/* As write() to the client. */
static ssize_t write_client(const uint8_t *bytes, size_t length) {
	if (!as_text)
		return write(1, bytes, length);
	if (text.at == text.length)
		encode_text(bytes, length);
	ssize_t n = write(1, text.bytes + text.at, text.length - text.at);
	if (n <= 0)
		return n;
	text.at += (size_t)n;
	errno = EAGAIN;
	return text.at == text.length ? (ssize_t)text.taken : -1;
}

/* Sends what the client takes. Returns whether that was everything. */
bool flush(void) {
	while (out.at < out.length || out.in_middle) {
		size_t end = out.in_middle ? sizeof(struct header) : out.length;
		bool splicing = out.at == end;
		ssize_t n = splicing ? splice(out.middle[0], NULL, 1, NULL, out.in_middle, SPLICE_F_NONBLOCK)
		                     : write_client(out.bytes + out.at, end - out.at);
		if (n > 0 && splicing)
			out.in_middle -= (size_t)n;
		else if (n > 0)
			out.at += (size_t)n;
		else if (n < 0 && errno == EAGAIN)
			return false;
		else if (n == 0 || errno != EINTR) {
			end_connection();
			sealed = !serving;
			out.at = out.length = out.in_middle = 0;
		}
	}
	out.at = out.length = 0;
	return true;
}

/* Made when the first loud process comes: large pipes are counted against the user. */
static bool have_middle(void) {
	static bool tried;
	if (tried)
		return out.middle[0] >= 0;
	tried = true;
	if (as_text || pipe2(out.middle, O_CLOEXEC | O_NONBLOCK) < 0)
		return false;
	/* The pipe is empty, so EAGAIN says that stdout can be spliced to. An append-only file cannot. */
	if (splice(out.middle[0], NULL, 1, NULL, 1, SPLICE_F_NONBLOCK) < 0 && errno != EAGAIN) {
		close_fd(&out.middle[0]);
		close_fd(&out.middle[1]);
		return false;
	}
	fcntl(out.middle[1], F_SETPIPE_SZ, BIG_PIPE);
	fcntl(1, F_SETPIPE_SZ, BIG_PIPE); /* no pipe, no harm */
	return true;
}

/* Moves at most `limit` bytes from the channel towards the client. As read(): 0 at end of file, -1 with errno. */
ssize_t tell_output(uint32_t id, struct channel *channel, size_t limit) {
	if (channel->loud && !out.length && have_middle()) {
		ssize_t n = splice(channel->fd, NULL, out.middle[1], NULL, limit, SPLICE_F_NONBLOCK);
		if (n > 0) {
			queue_header(TELL_DATA, id, channel->number, (size_t)n);
			out.in_middle = (size_t)n;
			flush();
		}
		return n;
	}
	uint8_t *payload = reserve(sizeof(struct header) + READ_CHUNK) + sizeof(struct header);
	ssize_t n = read(channel->fd, payload, smaller(limit, READ_CHUNK));
	if (n > 0 && serving && channel->kind == FD_OUTPUT)
		keep_output(channel, payload, (size_t)n);
	if (n > 0 && attached) {
		queue_header(TELL_DATA, id, channel->number, (size_t)n);
		out.length += (size_t)n;
	}
	return n;
}

/* Returns how many bytes at `p` were used; 0 when more are needed. */
static size_t take_preamble(const uint8_t *p, size_t length) {
	size_t seen = smaller(length, sizeof preamble);
	if (memcmp(p, preamble, seen) != 0)
		protocol_error("the stream does not begin with the preamble of version 1");
	in.greeted = seen == sizeof preamble;
	return in.greeted ? seen : 0;
}

static size_t take_frame(uint8_t *p, size_t length) {
	struct header header;
	if (length < sizeof header)
		return 0;
	memcpy(&header, p, sizeof header);
	if (header.length > MAX_PAYLOAD || header.reserved || !is_request(&header)) {
		protocol_error(header.length > MAX_PAYLOAD ? "a frame is too long" : "a malformed frame");
		return 0;
	}
	if (length - sizeof header < header.length)
		return 0;
	on_request(&header, p + sizeof header);
	return sizeof header + header.length;
}

void set_lease(long seconds) {
	in.lease = seconds * SECOND;
	in.heard_at = now_ns();
}

/* When the client has been silent for too long. */
int64_t lease_end(void) { return in.lease ? in.heard_at + in.lease : NEVER; }

/* Said first, so that whoever wakes up later does not take our killing for the ends of its commands. */
void end_lease(void) {
	static const char why[] = "no sign of life came for the time of the lease";
	tell(TELL_ERROR, 0, 0, why, sizeof why - 1);
	sealed = true;
	closing = true;
}

void read_client(void) {
	ssize_t n = read(0, in.bytes + in.length, sizeof in.bytes - in.length);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		end_connection();
		return;
	}
	if (in.lease)
		in.heard_at = now_ns();
	in.length += (size_t)n;
	size_t at = 0;
	for (size_t used = 1; used && at < in.length && !in.broken; at += used)
		used = in.greeted ? take_frame(in.bytes + at, in.length - at) : take_preamble(in.bytes, in.length);
	in.length -= at;
	memmove(in.bytes, in.bytes + at, in.length);
	if (serving && in.broken) {
		flush();
		end_connection();
	}
}

bool lost_client(void) { return in.lost; }

/* For the next client, which greeted us before we took it. */
void reset_wire(void) {
	out.at = out.length = in.length = 0;
	in.broken = in.lost = false;
	in.greeted = true;
	in.heard_at = now_ns();
}
