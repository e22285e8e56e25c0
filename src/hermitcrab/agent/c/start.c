/* START: from the frame to a supervisor that runs the command. */
#include "agent.h"

#include <sys/mman.h>
#include <sys/socket.h>

enum { FIELD_HEAD = 5 };

static struct planned_fd *find_fd(struct start *start, uint8_t number) {
	for (size_t i = 0; i < start->fd_count; i++)
		if (start->fds[i].number == number)
			return &start->fds[i];
	return NULL;
}

/* This and the next two return what is wrong, or NULL. */
static const char *add_fd(struct start *start, const uint8_t *value, size_t size) {
	static const char wrong[] = "START has a malformed descriptor";
	if (size < 2 || value[0] > 254 || value[1] > FD_TERMINAL || find_fd(start, value[0]))
		return wrong;
	struct planned_fd plan = {.number = value[0], .kind = value[1], .content = value + 2, .size = size - 2};
	static const size_t sizes[] = {[FD_SAME] = 1, [FD_TERMINAL] = 4};
	if (plan.kind != FD_CONTENT && plan.size != sizes[plan.kind])
		return wrong;
	if (plan.kind == FD_TERMINAL && start->terminal)
		return "START has more than one terminal";
	if (plan.kind == FD_SAME && !(plan.same = find_fd(start, value[2])))
		return wrong;
	start->fds[start->fd_count] = plan;
	if (plan.kind == FD_TERMINAL)
		start->terminal = &start->fds[start->fd_count];
	start->fd_count++;
	return NULL;
}

/*
 * The string needs no copy: it is moved one byte to the left, over the last byte of its length (0, as
 * no frame is that long), to make room for a NUL.
 */
static const char *add_string(struct start *start, uint8_t tag, uint8_t *value, size_t size) {
	if (memchr(value, 0, size))
		return "START has a NUL byte in a string";
	char *text = memmove(value - 1, value, size);
	text[size] = 0;
	if (tag == FIELD_ARG)
		start->argv[start->argc++] = text;
	else if (tag == FIELD_ENV)
		start->env[start->envc++] = text;
	else if (tag == FIELD_CWD)
		start->cwd = text;
	else
		start->program = text;
	return NULL;
}

/* At least as many as parse() comes to. */
static size_t count_fields(const uint8_t *p, size_t length) {
	size_t count = 0;
	for (size_t at = 0; at + FIELD_HEAD <= length; at += FIELD_HEAD + get32(p + at + 1))
		count++;
	return count;
}

static const char *parse(struct start *start, uint8_t *p, size_t length) {
	for (const uint8_t *end = p + length; p < end;) {
		if (end - p < FIELD_HEAD || get32(p + 1) > end - p - FIELD_HEAD)
			return "START is cut off in a field";
		uint8_t tag = p[0], *value = p + FIELD_HEAD;
		size_t size = get32(p + 1);
		const char *wrong = NULL;
		if (tag == FIELD_FD)
			wrong = add_fd(start, value, size);
		else if (tag == FIELD_INHERIT)
			start->inherit = true;
		else if (tag >= FIELD_ARG && tag <= FIELD_PROGRAM)
			wrong = add_string(start, tag, value, size);
		else
			wrong = "START has a field of an unknown tag";
		if (wrong)
			return wrong;
		p = value + size;
	}
	return start->argc ? NULL : "START has no argument";
}

/* The name of `entry` is given anew by one of the ENV fields. */
static bool overridden(const char *entry, const struct start *start) {
	const char *equals = strchr(entry, '=');
	size_t length = equals ? (size_t)(equals - entry) + 1 : strlen(entry);
	for (size_t i = 0; i < start->envc; i++)
		if (strncmp(entry, start->env[i], length) == 0)
			return true;
	return false;
}

static const char *search_path(const struct start *start) {
	for (size_t i = 0; i < start->envc; i++)
		if (strncmp(start->env[i], "PATH=", 5) == 0)
			return start->env[i] + 5;
	const char *own = getenv("PATH");
	return own ? own : "/usr/local/bin:/usr/bin:/bin";
}

static void inherit_environment(struct start *start) {
	size_t own = 0, kept = 0;
	while (environ[own])
		own++;
	char **all = must(malloc((own + start->envc + 1) * sizeof *all));
	for (size_t i = 0; i < own; i++)
		if (!overridden(environ[i], start))
			all[kept++] = environ[i];
	memcpy(all + kept, start->env, (start->envc + 1) * sizeof *all);
	free(start->env);
	start->env = all;
}

/* Everything that the fields leave open. */
static void complete(struct start *start) {
	start->argv[start->argc] = start->env[start->envc] = NULL;
	if (!*start->program)
		start->program = start->argv[0];
	start->search = search_path(start);
	if (start->inherit)
		inherit_environment(start);
	for (uint8_t number = 0; number < 3; number++)
		if (!find_fd(start, number))
			start->fds[start->fd_count++] = (struct planned_fd){.number = number, .kind = FD_NULL};
}

static int content_file(const uint8_t *content, size_t size) {
	int fd = memfd_create("content", MFD_CLOEXEC);
	for (size_t done = 0; fd >= 0 && done < size;) {
		ssize_t n = pwrite(fd, content + done, size - done, (off_t)done);
		if (n > 0)
			done += (size_t)n;
		else if (n == 0 || errno != EINTR)
			close_fd(&fd);
	}
	return fd;
}

/* Our end does not block. A channel without a pipe is known all the same: the client may send for it. */
static int channel_pipe(struct exec *exec, const struct planned_fd *plan) {
	bool input = plan->kind == FD_INPUT;
	struct channel *channel = add_channel(exec, plan->number, plan->kind);
	int ends[2];
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -1;
	channel->fd = ends[input];
	channel->left = input ? 0 : UINT64_MAX;
	fcntl(channel->fd, F_SETFL, O_NONBLOCK);
	return ends[!input];
}

static int channel_terminal(struct exec *exec, const struct planned_fd *plan) {
	struct channel *shown = add_channel(exec, plan->number, FD_OUTPUT);
	struct channel *typed = add_channel(exec, plan->number, FD_INPUT);
	shown->terminal = typed->terminal = true;
	int slave = open_terminal(plan->content, &shown->fd);
	if (slave < 0)
		return -1;
	shown->left = UINT64_MAX;
	typed->fd = fcntl(shown->fd, F_DUPFD_CLOEXEC, 0);
	if (typed->fd < 0)
		close_fd(&slave);
	return slave;
}

/* Read once, when the process has ended: whatever it writes there wakes nobody. */
static int channel_file(struct exec *exec, const struct planned_fd *plan) {
	struct channel *channel = add_channel(exec, plan->number, plan->kind);
	int fd = content_file(NULL, 0);
	channel->fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return fd;
}

static int open_fd(struct exec *exec, const struct planned_fd *plan) {
	switch (plan->kind) {
	case FD_NULL:
		return dev_null;
	case FD_SAME:
		return plan->same->fd;
	case FD_CONTENT:
		return content_file(plan->content, plan->size);
	case FD_FILE:
		return channel_file(exec, plan);
	case FD_TERMINAL:
		return channel_terminal(exec, plan);
	default:
		return channel_pipe(exec, plan);
	}
}

/* Returns 0 or an errno. */
static int fork_supervisor(struct exec *exec, const struct start *start) {
	int ends[2];
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		return errno;
	pid_t pid = fork();
	if (pid == 0)
		supervise(start, ends[1]);
	int error = pid < 0 ? errno : 0;
	close(ends[1]);
	if (error) {
		close(ends[0]);
	} else {
		exec->supervisor = pid;
		exec->socket = ends[0];
	}
	return error;
}

/* Returns 0 or an errno and what failed, with nothing left behind but the channels. */
static int launch(struct exec *exec, struct start *start, const char **what) {
	int error = 0;
	*what = "the agent cannot start a process";
	for (struct planned_fd *plan = start->fds; plan < start->fds + start->fd_count; plan++) {
		plan->fd = open_fd(exec, plan);
		if (plan->fd >= 0 || error)
			continue;
		error = errno;
		if (plan->kind == FD_TERMINAL)
			*what = "cannot open a terminal";
	}
	if (!error)
		error = give_to_spare(exec, start) ? 0 : fork_supervisor(exec, start);
	for (struct planned_fd *plan = start->fds; plan < start->fds + start->fd_count; plan++)
		if (plan->kind != FD_NULL && plan->kind != FD_SAME)
			close_fd(&plan->fd);
	return error;
}

/* Returns what is wrong, or NULL. The strings stay where they are, and the payload is changed. */
const char *read_start(struct start *start, uint8_t *payload, size_t length) {
	size_t room = count_fields(payload, length) + 1;
	start->argv = must(malloc(room * sizeof *start->argv));
	start->env = must(malloc(room * sizeof *start->env));
	start->cwd = start->program = "";
	const char *wrong = parse(start, payload, length);
	if (!wrong)
		complete(start);
	return wrong;
}

void free_start(struct start *start) {
	free(start->argv);
	free(start->env);
	*start = (struct start){0};
}

void start_exec(uint32_t id, uint8_t *payload, size_t length) {
	struct start start = {.copied = copy_job(payload, length)};
	const char *wrong = read_start(&start, payload, length);
	if (wrong) {
		protocol_error(wrong);
	} else {
		struct exec *exec = add_exec(id);
		exec->channels = must(calloc(start.fd_count + 1, sizeof *exec->channels)); /* a terminal has two */
		const char *what;
		int error = launch(exec, &start, &what);
		if (error) {
			struct ending ending = {0};
			not_started(&ending, 126, what, "", error);
			begin_end(exec, &ending);
			exec->gone = true;
		}
	}
	free_start(&start);
}
