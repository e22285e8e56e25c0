/*
 * --serve: an agent that outlives its clients. It listens on a socket, one client at a time is attached, and
 * descriptors 0 and 1 are that client or, while there is none, /dev/null. What a client may not have received
 * is kept: output until it is credited, at most OUTPUT_CREDIT of a channel, and an ended exec until FORGET.
 */
#include "agent.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

enum { TOKEN = 16, NEWCOMERS = 8, KEPT_EXECS = 256, MAX_CHANNELS = 255 };

bool serving, attached = true;

/* What whoever connects must send first: the preamble and an ATTACH. */
struct __attribute__((packed)) greeting {
	uint8_t preamble[sizeof preamble];
	struct header header;
	uint8_t token[TOKEN];
	uint32_t lease;
};

static struct newcomer {
	int fd; /* -1 for a free place */
	size_t length;
	union {
		uint8_t bytes[sizeof(struct greeting)];
		struct greeting greeting;
	};
} newcomers[NEWCOMERS];

static struct sockaddr_un address = {.sun_family = AF_UNIX};
static int listener = -1;
static uint8_t token[TOKEN]; /* that of the first client */
static bool have_token;

/* Returns a socket, or -1 when nobody listens there. */
int connect_to(const char *path) {
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	errno = ENAMETOOLONG;
	int fd = strlen(path) < sizeof to.sun_path ? socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
	if (fd < 0)
		return -1;
	strcpy(to.sun_path, path);
	if (connect(fd, (struct sockaddr *)&to, sizeof to) < 0)
		close_fd(&fd);
	return fd;
}

static void make_directory(const char *path) {
	char directory[sizeof address.sun_path];
	const char *slash = strrchr(path, '/');
	snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - path) : 0, path);
	mkdir(directory, 0700);
}

static bool bind_address(void) {
	mode_t mask = umask(0177);
	bool bound = bind(listener, (struct sockaddr *)&address, sizeof address) == 0;
	umask(mask);
	return bound;
}

/* Returns what is wrong, or NULL. */
static const char *listen_at(const char *path) {
	if (strlen(path) >= sizeof address.sun_path)
		return "the path is too long for a socket";
	strcpy(address.sun_path, path);
	make_directory(path);
	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	bool bound = listener >= 0 && bind_address();
	struct stat there;
	if (!bound && errno == EADDRINUSE && lstat(path, &there) == 0 && S_ISSOCK(there.st_mode)) {
		int served = connect_to(path);
		if (served >= 0) {
			close_fd(&served);
			return "another agent serves there";
		}
		unlink(path); /* left by one that was killed */
		bound = bind_address();
	}
	return bound && listen(listener, NEWCOMERS) == 0 ? NULL : strerror(errno);
}

static void hang_up(void) {
	dup2(dev_null, 0);
	dup2(dev_null, 1);
	attached = false;
}

/*
 * --join: serves at the path in a process of its own, unless somebody does. Returns whether this is that
 * process. It has no parent of ours: whoever ends the pipe's process with all its children does not end it.
 */
bool serve_apart(const char *path) {
	if (listen_at(path))
		return false; /* the relay says why, if it is not that somebody serves */
	pid_t child = fork();
	if (child == 0) {
		setsid();
		child = fork();
		if (child == 0)
			return true;
		_exit(child < 0);
	}
	waitpid(child, NULL, 0);
	close_fd(&listener);
	return false;
}

bool begin_serving(const char *path) {
	const char *wrong = listener < 0 ? listen_at(path) : NULL;
	if (wrong) {
		fprintf(stderr, "hermitcrab-agent: cannot serve at %s: %s\n", path, wrong);
		return false;
	}
	for (size_t i = 0; i < NEWCOMERS; i++)
		newcomers[i].fd = -1;
	hang_up();
	dup2(dev_null, 2); /* whoever started us may wait for its end */
	return serving = true;
}

void end_serving(void) {
	if (serving)
		unlink(address.sun_path);
}

/* Of what a process wrote: keeps the last that the client has not credited. */
void keep_output(struct channel *channel, const uint8_t *bytes, size_t length) {
	struct kept *kept = &channel->kept;
	if (kept->at + kept->length + length > kept->room) {
		size_t needed = kept->length + length;
		if (needed > kept->room / 2) /* else moving what is there to the front makes enough room */
			kept->bytes = must(realloc(kept->bytes, kept->room = 2 * needed));
		memmove(kept->bytes, kept->bytes + kept->at, kept->length);
		kept->at = 0;
	}
	memcpy(kept->bytes + kept->at + kept->length, bytes, length);
	kept->length += length;
	if (kept->length > OUTPUT_CREDIT)
		release_output(channel, kept->length - OUTPUT_CREDIT);
}

void release_output(struct channel *channel, size_t length) {
	length = smaller(length, channel->kept.length);
	channel->kept.at += length;
	channel->kept.length -= length;
}

/* What the client said that it took will not be sent again; the rest of a FILE will. */
static void rewind_channel(struct channel *channel) {
	if (channel->kind == FD_FILE && channel->fd >= 0) {
		uint32_t unsure = OUTPUT_CREDIT - channel->credit;
		channel->passed -= unsure;
		channel->left += unsure;
		channel->credit = 0; /* nothing is read from it before somebody wants it */
		if (unsure) /* else it is where it should be, or where the program that still runs writes next */
			lseek(channel->fd, (off_t)channel->passed, SEEK_SET);
	} else if (channel->kind == FD_OUTPUT) {
		channel->credit = OUTPUT_CREDIT; /* and stays so: nobody waits for a client that is not there */
	}
}

/* The next client must be told of its end anew. READ and WRITE end with their client. */
static void rewind_exec(struct exec *exec) {
	if (exec->transfer) {
		cancel_transfer(exec, CAUSE_KILL);
		exec->state = BURIED;
		exec->forgotten = true;
	}
	if (exec->forgotten)
		return;
	if (exec->state == EXITED || exec->state == BURIED)
		exec->state = DRAINING;
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
		rewind_channel(channel);
}

/* The client is gone, or another one came. */
void detach(void) {
	hang_up();
	reset_wire();
	for (struct exec *exec = execs; exec; exec = exec->next)
		rewind_exec(exec);
}

static void tell_known(const struct exec *exec) {
	uint8_t payload[2 + 10 * MAX_CHANNELS] = {exec->state != RUNNING}, *p = payload + 2;
	for (const struct channel *c = exec->channels; c < end_of_channels(exec) && payload[1] < MAX_CHANNELS; c++) {
		uint64_t position = c->passed - c->kept.length;
		*p++ = c->number;
		*p++ = c->kind == FD_INPUT ? FD_INPUT : FD_OUTPUT;
		memcpy(p, &position, sizeof position);
		p += sizeof position;
		payload[1]++;
	}
	tell(TELL_KNOWN, exec->id, 0, payload, (size_t)(p - payload));
}

/* Returns whether the new client must be told that it is closed; EXIT says so of all. */
static bool resume_channel(struct exec *exec, struct channel *channel) {
	bool open = channel->fd >= 0;
	if (channel->kind == FD_INPUT) {
		channel->credit = INPUT_CREDIT - (uint32_t)channel->waiting_length;
		if (open && !channel->ending && exec->state == RUNNING)
			tell(TELL_CREDIT, exec->id, channel->number, &channel->credit, sizeof channel->credit);
		return !open && !channel->ending && !channel->terminal;
	}
	const struct kept *kept = &channel->kept;
	channel->credit = OUTPUT_CREDIT - (uint32_t)kept->length;
	if (kept->length)
		tell(TELL_DATA, exec->id, channel->number, kept->bytes + kept->at, kept->length);
	return channel->kind == FD_OUTPUT && !channel->left;
}

static void resume_exec(struct exec *exec) {
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
		if (resume_channel(exec, channel) && exec->state == RUNNING)
			tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
}

static void send_error(int fd, const char *why) {
	struct header header = {.length = (uint32_t)strlen(why), .type = TELL_ERROR};
	char frame[sizeof header + 100];
	memcpy(frame, &header, sizeof header);
	memcpy(frame + sizeof header, why, header.length);
	send(fd, frame, sizeof header + header.length, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void attach(struct newcomer *newcomer) {
	if (attached) {
		protocol_error("another client has taken over");
		flush();
		detach();
	}
	reset_wire();
	dup2(newcomer->fd, 0);
	dup2(newcomer->fd, 1);
	close_fd(&newcomer->fd);
	attached = true;
	set_lease(newcomer->greeting.lease);
	for (struct exec *exec = execs; exec; exec = exec->next)
		if (exec->forgotten)
			exec->id = 0; /* what it left may run on, but this client may use the number */
	say_hello();
	for (struct exec *exec = execs; exec; exec = exec->next)
		if (!exec->forgotten)
			tell_known(exec);
	tell(TELL_SYNCED, 0, 0, NULL, 0);
	for (struct exec *exec = execs; exec; exec = exec->next)
		if (!exec->forgotten)
			resume_exec(exec);
}

/* In a time that does not depend on where they differ. */
static bool is_token(const uint8_t *given) {
	uint8_t difference = 0;
	for (size_t i = 0; i < TOKEN; i++)
		difference |= given[i] ^ token[i];
	return !difference;
}

/* Returns what is wrong with as much as is there, or NULL. */
static const char *judge(const struct newcomer *newcomer) {
	static const struct header wanted = {.length = TOKEN + sizeof(uint32_t), .type = ASK_ATTACH};
	const struct greeting *greeting = &newcomer->greeting;
	size_t length = newcomer->length, header_end = offsetof(struct greeting, token);
	if (memcmp(greeting->preamble, preamble, smaller(length, sizeof preamble)) != 0)
		return "the stream does not begin with the preamble of version 1";
	if (length >= header_end && memcmp(&greeting->header, &wanted, sizeof wanted) != 0)
		return "the first frame is no ATTACH";
	if (length == sizeof *greeting && have_token && !is_token(greeting->token))
		return "the token is another";
	return NULL;
}

static void hear_newcomer(struct newcomer *newcomer) {
	ssize_t n = read(newcomer->fd, newcomer->bytes + newcomer->length, sizeof newcomer->bytes - newcomer->length);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	newcomer->length += n > 0 ? (size_t)n : 0;
	const char *wrong = judge(newcomer);
	if (wrong)
		send_error(newcomer->fd, wrong);
	if (wrong || n <= 0) {
		close_fd(&newcomer->fd);
	} else if (newcomer->length == sizeof newcomer->bytes) {
		memcpy(token, newcomer->greeting.token, TOKEN); /* the first fixes it */
		have_token = true;
		attach(newcomer);
	}
}

/* Those who connect and say nothing make room for later ones. */
static void let_in(void) {
	static size_t turn;
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0)
		return;
	struct newcomer *place = NULL;
	for (size_t i = 0; i < NEWCOMERS; i++)
		if (newcomers[i].fd < 0)
			place = &newcomers[i];
	if (!place)
		place = &newcomers[turn++ % NEWCOMERS];
	close_fd(&place->fd);
	place->fd = fd;
	place->length = 0;
	send(fd, preamble, sizeof preamble, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void watch_newcomers(void) {
	watch(listener, POLLIN, NULL, NULL);
	for (size_t i = 0; i < NEWCOMERS; i++)
		if (newcomers[i].fd >= 0)
			watch(newcomers[i].fd, POLLIN, NULL, NULL);
}

void on_newcomer(int fd) {
	if (fd == listener)
		let_in();
	for (size_t i = 0; i < NEWCOMERS; i++)
		if (newcomers[i].fd == fd)
			hear_newcomer(&newcomers[i]);
}

/* The client has its result, or nobody ever asked for it. */
void forget(struct exec *exec) {
	exec->forgotten = true;
	if (exec->state == DRAINING)
		exec->state = EXITED;
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
		channel->left = 0;
}

/* The newest come first. */
void forget_oldest(void) {
	size_t kept = 0;
	for (struct exec *exec = execs; exec; exec = exec->next)
		if (exec->gone && !exec->forgotten && exec->state != RUNNING && ++kept > KEPT_EXECS)
			forget(exec);
}
