/*
 * hermitcrab-agent: starts processes for a client over one byte pipe, carries their descriptors and
 * ends them. PROTOCOL.md beside this file is the wire format.
 *
 *   agent            speak the protocol on stdin and stdout
 *   agent --version  print the version
 *
 * Exit status: 0 at end of file (or SIGTERM, or when nobody reads us), 3 after a protocol error, 2 for
 * a wrong command line, 1 when even starting up failed.
 *
 * Three kinds of process run this file:
 *
 *   agent       one poll loop; owns the client's pipe and our ends of all children's pipes
 *   supervisor  one per exec, a child subreaper: everything the command starts stays below it. It
 *               reaps, reports and kills; it talks to the agent over a socketpair
 *   command     what a supervisor became by execve
 *
 * It must work in an empty root file system: static, no files needed, /proc and /dev used when there.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436 /* the same on every architecture */
#endif

enum { VERSION = 1, HEADER = 12, MAX_PAYLOAD = 1 << 20, OUTPUT_CREDIT = 1 << 20, INPUT_CREDIT = 1 << 18 };
enum { ASK_START = 1, ASK_DATA, ASK_CLOSE, ASK_CREDIT, ASK_SIGNAL, ASK_KILL, ASK_TIMER };
enum { TELL_HELLO = 64, TELL_DATA, TELL_CLOSE, TELL_CREDIT, TELL_EXIT, TELL_GONE, TELL_ERROR };
enum { FIELD_ARG = 1, FIELD_ENV, FIELD_CWD, FIELD_FD, FIELD_PROGRAM, FIELD_INHERIT };
enum { FD_NULL, FD_INPUT, FD_OUTPUT, FD_CONTENT, FD_SAME };
enum { CAUSE_ENDED, CAUSE_KILL, CAUSE_TIMER, CAUSE_NOT_STARTED, CAUSE_SUPERVISOR_LOST };
enum { FLAG_SURVIVORS = 1, FEATURE_SUBREAPER = 1, FEATURE_SEES_ALL = 2 };

enum {
	READ_CHUNK = 64 << 10,     /* one read() of a child's pipe */
	LOUD = 32 << 10,           /* a pipe that gave that much at once is worth splicing */
	GATHER = 256 << 10,        /* stop collecting frames for one write() at that size */
	BACKLOG = 4 << 20,         /* a client that does not read this much is not listened to either */
	CREDIT_STEP = 64 << 10,    /* return input credit in pieces of at least this */
	BIG_PIPE = 1 << 20,        /* the most an unprivileged process may ask for */
	LOST_GRACE_MS = 250,       /* between TERM and KILL when the client or the agent is gone */
};

#define MS INT64_C(1000000)
#define SECOND (1000 * MS)
#define NEVER INT64_MAX
static const int64_t GIVE_UP = 2 * SECOND;  /* a kill without progress for that long has survivors */
static const int64_t QUIET = 5 * MS;        /* an exec silent for that long has its next output held ... */
static const int64_t HOLD = MS / 2;         /* ... for that long, so that it and EXIT can share a write */
static const int64_t HOLD_STATE = 2 * MS;   /* the same above descriptor 2: no person waits for those */

static pid_t agent_pid;
static bool have_proc;
static int dev_null = -1;
static int highest_fd = 2;
static struct rlimit original_nofile;
static sigset_t all_open;      /* the empty mask: SIGCHLD wakes us */
static sigset_t child_blocked; /* the agent's while it waits and no child is expected to end */
static volatile sig_atomic_t asked_to_end;

/* ---------------------------------------------------------------- small helpers */

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * SECOND + t.tv_nsec;
}

static int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }
static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static uint32_t get32(const uint8_t *p)
{
	return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void put(uint8_t *p, uint64_t value, int bytes)
{
	for (int i = 0; i < bytes; i++)
		p[i] = (uint8_t)(value >> (8 * i));
}

/* Without memory there is nothing sensible left to do; the supervisors see us go and end their trees. */
static void *must(void *p)
{
	if (!p)
		_exit(1);
	return p;
}

/* Remembers how far descriptors reach, for kernels without close_range. */
static int note_fd(int fd)
{
	if (fd > highest_fd)
		highest_fd = fd;
	return fd;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void close_from(int first)
{
	if (syscall(SYS_close_range, first, ~0U, 0) == 0)
		return;
	for (int fd = first; fd <= highest_fd; fd++)
		close(fd);
}

static int wait_for(struct pollfd *fds, nfds_t count, int64_t until, const sigset_t *mask)
{
	struct timespec left = {0, 0};
	if (until != NEVER) {
		int64_t ns = until - now_ns();
		if (ns > 0)
			left = (struct timespec){ns / SECOND, ns % SECOND};
	}
	return ppoll(fds, count, until == NEVER ? NULL : &left, mask);
}

/* ---------------------------------------------------------------- the process tree, from /proc */

struct process {
	pid_t pid, parent;
	char state;
	bool ours;
};

static struct process *processes;
static size_t process_count, process_room;

/* The name in stat is chosen by the process and may hold spaces and parentheses: skip to the last ')'. */
static bool read_stat(const char *pid, struct process *process)
{
	char path[64], text[1024];
	snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = 0;
	char *after = strrchr(text, ')');
	int parent;
	if (!after || sscanf(after + 1, " %c %d", &process->state, &parent) != 2)
		return false;
	process->pid = atoi(pid);
	process->parent = parent;
	process->ours = false;
	return true;
}

static int by_pid(const void *a, const void *b)
{
	pid_t x = ((const struct process *)a)->pid, y = ((const struct process *)b)->pid;
	return (x > y) - (x < y);
}

static bool scan_processes(void)
{
	DIR *dir = opendir("/proc");
	if (!dir)
		return false;
	process_count = 0;
	for (struct dirent *entry; (entry = readdir(dir));) {
		if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
			continue;
		if (process_count == process_room) {
			process_room = process_room ? 2 * process_room : 256;
			processes = must(realloc(processes, process_room * sizeof *processes));
		}
		if (read_stat(entry->d_name, &processes[process_count]))
			process_count++;
	}
	closedir(dir);
	qsort(processes, process_count, sizeof *processes, by_pid);
	return true;
}

static struct process *find_process(pid_t pid)
{
	struct process key = {.pid = pid};
	return process_count ? bsearch(&key, processes, process_count, sizeof key, by_pid) : NULL;
}

/*
 * Scans and marks every living descendant of root, except below the children that `spared` names.
 * Returns how many. Parents mostly have smaller pids, so this takes two or three passes.
 */
static size_t mark_descendants(pid_t root, bool (*spared)(pid_t))
{
	size_t found = 0;
	if (!scan_processes())
		return 0;
	for (bool changed = true; changed;) {
		changed = false;
		for (size_t i = 0; i < process_count; i++) {
			struct process *p = &processes[i], *parent;
			if (p->ours || p->pid == root)
				continue;
			if (p->parent == root)
				p->ours = !spared || !spared(p->pid);
			else
				p->ours = (parent = find_process(p->parent)) && parent->ours;
			changed |= p->ours;
		}
	}
	for (size_t i = 0; i < process_count; i++) {
		if (processes[i].state == 'Z' || processes[i].state == 'X')
			processes[i].ours = false;
		found += processes[i].ours;
	}
	return found;
}

static void signal_marked(int number)
{
	for (size_t i = 0; i < process_count; i++)
		if (processes[i].ours)
			kill(processes[i].pid, number);
}

/* STOP first and look again, so that nothing forks away between the look and the KILL. */
static size_t stop_and_kill(pid_t root, bool (*spared)(pid_t))
{
	size_t before = 0, found = 0;
	for (int pass = 0; pass < 10; pass++) {
		found = mark_descendants(root, spared);
		if (!found || found == before)
			break;
		signal_marked(SIGSTOP);
		before = found;
	}
	signal_marked(SIGKILL);
	return found;
}

/* ---------------------------------------------------------------- agent <-> supervisor messages */

enum { ORDER_SIGNAL, ORDER_KILL };
struct order {
	uint32_t what;
	uint32_t value; /* the signal, or the cause of the kill */
	uint32_t grace_ms;
};

enum { REPORT_EXIT = 1, REPORT_GONE = 2 }; /* bits: both may come in one message */
struct report {
	uint8_t what, cause, flags;
	int32_t code;
	uint64_t user_us, system_us, peak_kib, wall_us;
	uint32_t text_length;
	char text[600];
};

static int send_message(int socket, const void *message, size_t length)
{
	return send(socket, message, length, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)length ? 0 : -1;
}

static void set_reason(struct report *report, const char *what, const char *name, int error)
{
	int n = snprintf(report->text, sizeof report->text, "%s%.400s: %s", what, name, strerror(error));
	report->text_length = (uint32_t)smaller((size_t)n, sizeof report->text - 1);
}

/* ---------------------------------------------------------------- the command, before execve */

struct placed_fd {
	uint8_t number;
	bool owned; /* made for this exec; otherwise /dev/null or the same as another */
	int source;
};

struct start {
	char **argv, **env;
	const char *cwd, *program, *search;
	size_t fd_count;
	struct placed_fd fds[258];
};

enum { STAGE_NONE, STAGE_FDS, STAGE_CWD, STAGE_PROGRAM };
/* In shared memory, so that it reaches the supervisor whether vfork shares memory (Linux) or copies it (qemu). */
struct failure {
	int stage, error;
};

static int place_fds(const struct start *start)
{
	int top = 2;
	for (size_t i = 0; i < start->fd_count; i++)
		if (start->fds[i].number > top)
			top = start->fds[i].number;
	int moved[258];
	/* First everything above the highest target, so that no dup2 overwrites a source still needed. */
	for (size_t i = 0; i < start->fd_count; i++) {
		moved[i] = start->fds[i].source;
		if (moved[i] <= top && (moved[i] = fcntl(moved[i], F_DUPFD_CLOEXEC, top + 1)) < 0)
			return -1;
	}
	for (size_t i = 0; i < start->fd_count; i++)
		if (dup2(moved[i], start->fds[i].number) < 0)
			return -1;
	return 0;
}

/* Returns the errno; ELIBACC when the file is there and its interpreter is not. */
static int try_program(const char *path, const struct start *start)
{
	execve(path, start->argv, start->env);
	return errno == ENOENT && access(path, F_OK) == 0 ? ELIBACC : errno;
}

/* As execvpe, with our PATH and without its detour to /bin/sh. */
static int execute(const struct start *start)
{
	char path[8192];
	int result = ENOENT;
	if (strchr(start->program, '/'))
		return try_program(start->program, start);
	for (const char *at = start->search; *start->program; at++) {
		size_t length = strcspn(at, ":");
		int n = snprintf(path, sizeof path, "%.*s%s%s", (int)length, at, length ? "/" : "./", start->program);
		int error = n < (int)sizeof path ? try_program(path, start) : ENOENT;
		if (error == EACCES)
			result = EACCES; /* unless a later directory has one that can be run */
		else if (error != ENOENT && error != ENOTDIR)
			return error;
		at += length;
		if (!*at)
			break;
	}
	return result;
}

static _Noreturn void become_command(const struct start *start, volatile struct failure *failure)
{
	setsid();
	sigprocmask(SIG_SETMASK, &all_open, NULL);
	failure->stage = STAGE_FDS;
	if (place_fds(start) == 0) {
		setrlimit(RLIMIT_NOFILE, &original_nofile);
		failure->stage = STAGE_CWD;
		if (!start->cwd || chdir(start->cwd) == 0) {
			failure->stage = STAGE_PROGRAM;
			errno = execute(start);
		}
	}
	failure->error = errno;
	_exit(127);
}

/* ---------------------------------------------------------------- the supervisor */

enum kill_phase { NOT_KILLING, ASKING, FORCING, GAVE_UP };

static struct {
	int socket; /* to the agent, -1 when it is gone */
	pid_t main_pid;
	bool main_ended, exit_sent;
	int64_t started;
	struct report report;
	volatile struct failure *failure;
	enum kill_phase phase;
	int64_t force_at, scan_at, progress_at;
	uint8_t kill_cause;
} sv;

static void sv_signal(int number)
{
	if (have_proc && mark_descendants(getpid(), NULL))
		signal_marked(number);
	else if (!have_proc)
		kill(-sv.main_pid, number); /* its group is all that we know of */
}

static void sv_describe_failure(const struct start *start)
{
	struct report *report = &sv.report;
	int error = sv.failure->error;
	report->cause = CAUSE_NOT_STARTED;
	report->code = 126;
	switch (sv.failure->stage) {
	case STAGE_FDS:
		set_reason(report, "cannot set up descriptors", "", error);
		break;
	case STAGE_CWD:
		set_reason(report, "cannot change to directory ", start->cwd, error);
		break;
	default:
		if (error == ENOENT)
			report->code = 127;
		if (error == ELIBACC)
			set_reason(report, "the interpreter is missing of ", start->program, ENOENT);
		else
			set_reason(report, "cannot execute ", start->program, error);
	}
}

static void sv_main_ended(int status, const struct rusage *usage, const struct start *start)
{
	struct report *report = &sv.report;
	sv.main_ended = true;
	report->code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
	report->user_us = (uint64_t)usage->ru_utime.tv_sec * 1000000 + (uint64_t)usage->ru_utime.tv_usec;
	report->system_us = (uint64_t)usage->ru_stime.tv_sec * 1000000 + (uint64_t)usage->ru_stime.tv_usec;
	report->peak_kib = (uint64_t)usage->ru_maxrss;
	report->wall_us = (uint64_t)(now_ns() - sv.started) / 1000;
	if (sv.phase != NOT_KILLING)
		report->cause = sv.kill_cause;
	/* execve never happened: what exited is still ours */
	if (sv.failure->error && WIFEXITED(status))
		sv_describe_failure(start);
}

/* Returns whether a child is left. */
static bool sv_reap(const struct start *start)
{
	for (;;) {
		int status;
		struct rusage usage;
		pid_t pid = wait4(-1, &status, WNOHANG | __WALL, &usage);
		if (pid == 0)
			return true;
		if (pid < 0 && errno != EINTR)
			return false;
		if (pid < 0)
			continue;
		sv.progress_at = now_ns();
		if (pid == sv.main_pid)
			sv_main_ended(status, &usage, start);
	}
}

static void sv_send(uint8_t what)
{
	if (sv.socket < 0)
		return;
	sv.report.what = what;
	if (what & REPORT_EXIT)
		sv.exit_sent = true;
	send_message(sv.socket, &sv.report, offsetof(struct report, text) + sv.report.text_length);
}

static void sv_kill(uint8_t cause, uint32_t grace_ms)
{
	int64_t now = now_ns(), force_at = now + grace_ms * MS;
	if (sv.phase == ASKING) {
		sv.force_at = earlier(sv.force_at, force_at);
		return;
	}
	if (sv.phase == FORCING)
		return;
	sv.phase = ASKING;
	sv.force_at = force_at;
	sv.kill_cause = cause;
	if (grace_ms) {
		sv_signal(SIGTERM);
		sv_signal(SIGCONT); /* a stopped process cannot answer */
	}
}

/* One step of a kill that is under way; called at every wake-up. */
static void sv_kill_step(void)
{
	int64_t now = now_ns();
	if (sv.phase == ASKING && now >= sv.force_at) {
		sv.phase = FORCING;
		sv.scan_at = sv.progress_at = now;
	}
	if (sv.phase != FORCING || now < sv.scan_at)
		return;
	if (have_proc)
		stop_and_kill(getpid(), NULL);
	else
		sv_signal(SIGKILL);
	/* SIGCHLD tells us the rest; the next look is only for what this one missed. */
	sv.scan_at = now_ns() + 20 * MS;
	if (now - sv.progress_at < GIVE_UP)
		return;
	sv.phase = GAVE_UP;
	if (sv.socket < 0)
		_exit(0);
	if (sv.exit_sent)
		return;
	sv.report.flags |= FLAG_SURVIVORS;
	if (!sv.main_ended) {
		sv.report.cause = sv.kill_cause;
		sv.report.code = -SIGKILL;
		sv.report.wall_us = (uint64_t)(now - sv.started) / 1000;
	}
	sv_send(REPORT_EXIT);
}

static void sv_take_orders(void)
{
	struct order order;
	for (;;) {
		ssize_t n = recv(sv.socket, &order, sizeof order, MSG_DONTWAIT);
		if (n == (ssize_t)sizeof order) {
			if (order.what == ORDER_SIGNAL)
				sv_signal((int)order.value);
			else
				sv_kill((uint8_t)order.value, order.grace_ms);
		} else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
			return;
		} else {
			close_fd(&sv.socket);
			if (sv.phase == GAVE_UP)
				_exit(0);
			sv_kill(CAUSE_KILL, LOST_GRACE_MS);
			return;
		}
	}
}

/* The supervisor keeps nothing but its socket: every other descriptor would delay somebody's end of file. */
static void sv_keep_only(int socket)
{
	if (socket != 0) {
		dup2(socket, 0);
		socket = 0;
	}
	close_from(1);
	sv.socket = socket;
}

static _Noreturn void supervise(const struct start *start, int socket)
{
	prctl(PR_SET_NAME, "crab-supervisor");
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	sv.failure = mmap(NULL, sizeof *sv.failure, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (sv.failure == MAP_FAILED)
		_exit(1);
	sv.started = now_ns();
	/* vfork: nothing is copied, and no order is taken before the program runs. */
	sv.main_pid = vfork();
	if (sv.main_pid == 0)
		become_command(start, sv.failure);
	int fork_error = errno;
	sv_keep_only(socket);
	if (sv.main_pid < 0) {
		sv.report.cause = CAUSE_NOT_STARTED;
		sv.report.code = 126;
		set_reason(&sv.report, "cannot start a process", "", fork_error);
		sv.main_ended = true;
	}
	for (;;) {
		if (!sv_reap(start)) {
			sv_send(sv.exit_sent ? REPORT_GONE : REPORT_EXIT | REPORT_GONE);
			_exit(0);
		}
		if (sv.main_ended && !sv.exit_sent && (sv.phase == NOT_KILLING || sv.phase == GAVE_UP))
			sv_send(REPORT_EXIT);
		sv_kill_step();
		int64_t until = sv.phase == ASKING ? sv.force_at : sv.phase == FORCING ? sv.scan_at : NEVER;
		struct pollfd wanted = {.fd = sv.socket, .events = POLLIN};
		if (wait_for(&wanted, 1, until, &all_open) > 0) {
			sv_reap(start); /* what ended before the order came ended by itself */
			sv_take_orders();
		}
	}
}

/* ---------------------------------------------------------------- what the agent knows of an exec */

struct channel {
	uint8_t number, kind;
	int fd;           /* our end, -1 when closed */
	uint32_t credit;  /* OUTPUT: what we may still send. INPUT: what the client may still send */
	uint32_t to_drain; /* OUTPUT, after the exit: bytes that were in the pipe and are still to be sent */
	bool loud, enlarged;
	uint32_t owed;    /* INPUT: passed on and not yet credited */
	bool ending;      /* INPUT: the client sent CLOSE */
	uint8_t *waiting; /* INPUT: what the pipe did not take yet */
	size_t waiting_at, waiting_length;
};

enum exec_state { RUNNING, DRAINING, EXITED };

struct exec {
	uint32_t id;
	pid_t supervisor; /* 0 when reaped */
	int socket;
	enum exec_state state;
	bool gone;  /* no process is left */
	bool dead;  /* GONE was sent; freed at the end of this turn */
	bool lost;  /* the supervisor was killed */
	struct report report;
	int64_t timer_at, timer_grace_ms;
	int64_t check_at; /* when to see whether a killing supervisor was itself stopped */
	int64_t held_until, active_at;
	size_t channel_count;
	struct channel *channels;
};

static struct exec **execs;
static size_t exec_count, exec_room;
static bool closing;
static int exit_status;
static int64_t close_by = NEVER;
static size_t unreaped;           /* supervisors that said goodbye and are not reaped yet */
static int64_t strays_since = NEVER; /* since when we hunt what a killed supervisor left */

static struct exec *find_exec(uint32_t id)
{
	for (size_t i = 0; i < exec_count; i++)
		if (execs[i]->id == id && !execs[i]->dead)
			return execs[i];
	return NULL;
}

static struct channel *find_channel(struct exec *exec, uint8_t number, uint8_t kind)
{
	for (size_t i = 0; i < exec->channel_count; i++)
		if (exec->channels[i].number == number && exec->channels[i].kind == kind)
			return &exec->channels[i];
	return NULL;
}

static void close_channel(struct channel *channel)
{
	close_fd(&channel->fd);
	free(channel->waiting);
	channel->waiting = NULL;
	channel->waiting_length = channel->waiting_at = 0;
	channel->to_drain = 0;
}

/* ---------------------------------------------------------------- frames to the client */

/*
 * Frames are gathered here and written once per turn of the loop. Bulk output does not pass through:
 * it waits in `middle`, a pipe of our own (nobody else can take bytes out of it, so a promised length
 * is kept), to be spliced to stdout when the buffer was written up to `middle_at`.
 */
static struct {
	uint8_t *bytes;
	size_t at, length, room;
	int middle[2];
	size_t middle_at, middle_left;
	bool blocked; /* the last write said EAGAIN */
	bool sealed;  /* nothing is sent any more: after ERROR, or when nobody reads */
	bool cannot_splice;
} out = {.middle = {-1, -1}};

static uint8_t *out_reserve(size_t bytes)
{
	if (out.length + bytes > out.room && out.at) {
		memmove(out.bytes, out.bytes + out.at, out.length - out.at);
		out.length -= out.at;
		out.middle_at -= smaller(out.at, out.middle_at);
		out.at = 0;
	}
	if (out.length + bytes > out.room) {
		out.room = out.length + bytes + READ_CHUNK;
		out.bytes = must(realloc(out.bytes, out.room));
	}
	return out.bytes + out.length;
}

static void put_header(uint8_t *p, uint8_t type, uint32_t id, uint8_t channel, size_t length)
{
	put(p, length, 4);
	p[4] = type;
	p[5] = channel;
	put(p + 6, 0, 2);
	put(p + 8, id, 4);
}

static void tell(uint8_t type, uint32_t id, uint8_t channel, const void *payload, size_t length)
{
	if (out.sealed)
		return;
	uint8_t *p = out_reserve(HEADER + length);
	put_header(p, type, id, channel, length);
	if (length)
		memcpy(p + HEADER, payload, length);
	out.length += HEADER + length;
}

static void tell_exit(const struct exec *exec)
{
	const struct report *report = &exec->report;
	uint8_t payload[40 + sizeof report->text] = {report->cause, report->flags};
	put(payload + 4, (uint32_t)report->code, 4);
	put(payload + 8, report->user_us, 8);
	put(payload + 16, report->system_us, 8);
	put(payload + 24, report->peak_kib, 8);
	put(payload + 32, report->wall_us, 8);
	memcpy(payload + 40, report->text, report->text_length);
	tell(TELL_EXIT, exec->id, 0, payload, 40 + report->text_length);
}

static void nobody_listens(void)
{
	out.sealed = true;
	out.blocked = false;
	out.at = out.length = out.middle_left = 0;
	close_fd(&out.middle[0]);
	close_fd(&out.middle[1]);
}

/* stdout takes no splice (a terminal, a file in append mode): put the bytes where they belong. */
static void unsplice(void)
{
	size_t left = out.middle_left, behind = out.length - out.middle_at;
	out.cannot_splice = true;
	out_reserve(left);
	uint8_t *gap = out.bytes + out.middle_at;
	memmove(gap + left, gap, behind);
	out.length += left;
	for (ssize_t n; left && (n = read(out.middle[0], gap, left)) > 0; left -= (size_t)n)
		gap += n;
	out.middle_left = 0;
}

static bool out_pending(void) { return out.at < out.length || out.middle_left; }

static void flush(void)
{
	out.blocked = false;
	while (out_pending()) {
		size_t end = out.middle_left ? out.middle_at : out.length;
		bool splicing = out.at == end;
		ssize_t n = splicing ? splice(out.middle[0], NULL, 1, NULL, out.middle_left, SPLICE_F_NONBLOCK)
		                     : write(1, out.bytes + out.at, end - out.at);
		if (n > 0 && splicing)
			out.middle_left -= (size_t)n;
		else if (n > 0)
			out.at += (size_t)n;
		else if (n < 0 && errno == EINTR)
			continue;
		else if (n < 0 && errno == EAGAIN) {
			out.blocked = true;
			return;
		} else if (splicing && n < 0 && (errno == EINVAL || errno == ENOSYS))
			unsplice();
		else {
			nobody_listens();
			closing = true;
		}
	}
	out.at = out.length = 0;
	if (out.room > BIG_PIPE) { /* a small agent forks fast */
		free(out.bytes);
		out.bytes = NULL;
		out.room = 0;
	}
}

static void protocol_error(const char *why)
{
	if (exit_status)
		return;
	tell(TELL_ERROR, 0, 0, why, strlen(why));
	out.sealed = true;
	closing = true;
	exit_status = 3;
}

/* ---------------------------------------------------------------- output of a process */

static char scratch[READ_CHUNK];

/* After EXIT: what background children print is read so that they neither block nor die, and dropped. */
static void drop_output(struct channel *channel)
{
	ssize_t n = read(channel->fd, scratch, sizeof scratch);
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
		close_channel(channel);
}

static bool may_splice(const struct channel *channel)
{
	if (!channel->loud || out.cannot_splice || out_pending())
		return false;
	if (out.middle[0] < 0) {
		if (pipe2(out.middle, O_CLOEXEC | O_NONBLOCK) < 0)
			return false;
		note_fd(out.middle[1]);
		fcntl(out.middle[1], F_SETPIPE_SZ, BIG_PIPE);
		fcntl(1, F_SETPIPE_SZ, BIG_PIPE); /* no pipe, no harm */
	}
	return true;
}

/* Moves at most `limit` bytes towards the client. As read(): 0 at end of file, -1 with errno. */
static ssize_t move_output(struct exec *exec, struct channel *channel, size_t limit)
{
	if (may_splice(channel)) {
		ssize_t n = splice(channel->fd, NULL, out.middle[1], NULL, limit, SPLICE_F_NONBLOCK);
		if (n >= 0 || (errno != EINVAL && errno != ENOSYS)) {
			if (n > 0) {
				put_header(out_reserve(HEADER), TELL_DATA, exec->id, channel->number, (size_t)n);
				out.length += HEADER;
				out.middle_at = out.length;
				out.middle_left = (size_t)n;
				flush();
			}
			return n;
		}
		out.cannot_splice = true;
	}
	uint8_t *p = out_reserve(HEADER + READ_CHUNK);
	ssize_t n = read(channel->fd, p + HEADER, smaller(limit, READ_CHUNK));
	if (n > 0) {
		put_header(p, TELL_DATA, exec->id, channel->number, (size_t)n);
		out.length += HEADER + (size_t)n;
	}
	return n;
}

static void take_output(struct exec *exec, struct channel *channel)
{
	bool draining = exec->state == DRAINING;
	size_t limit = draining ? smaller(channel->credit, channel->to_drain) : channel->credit;
	ssize_t n = move_output(exec, channel, limit);
	if (n > 0) {
		channel->credit -= (uint32_t)n;
		channel->to_drain -= draining ? (uint32_t)n : 0;
		channel->loud = n >= LOUD;
		if (channel->loud && !channel->enlarged) {
			channel->enlarged = true;
			fcntl(channel->fd, F_SETPIPE_SZ, BIG_PIPE);
		}
	} else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
		/* EXIT closes all channels, so a CLOSE just before it would say nothing. */
		if (!draining)
			tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
		close_channel(channel);
	} else if (errno == EAGAIN) {
		channel->to_drain = 0; /* some process read from its own output: those bytes are gone */
	}
}

static bool may_take(const struct exec *exec, const struct channel *channel)
{
	return channel->fd >= 0 && channel->credit && (exec->state != DRAINING || channel->to_drain);
}

/* ---------------------------------------------------------------- the end of an exec */

static void bury(struct exec *exec)
{
	tell(TELL_GONE, exec->id, 0, NULL, 0);
	exec->dead = true;
	for (size_t i = 0; i < exec->channel_count; i++)
		close_channel(&exec->channels[i]);
}

/* Sends EXIT as soon as everything before it was sent, and GONE when that is due too. */
static void finish(struct exec *exec)
{
	if (exec->state == DRAINING) {
		for (size_t i = 0; i < exec->channel_count; i++) {
			struct channel *channel = &exec->channels[i];
			while (!out.blocked && may_take(exec, channel)) {
				take_output(exec, channel);
				if (out.length - out.at > GATHER)
					flush();
			}
			if (channel->to_drain && !out.sealed)
				return;
		}
		tell_exit(exec);
		exec->state = EXITED;
	}
	if (exec->state == EXITED && exec->gone && !exec->dead)
		bury(exec);
}

static void main_ended(struct exec *exec)
{
	if (exec->state != RUNNING)
		return;
	exec->state = DRAINING;
	exec->timer_at = NEVER;
	exec->held_until = 0;
	for (size_t i = 0; i < exec->channel_count; i++) {
		struct channel *channel = &exec->channels[i];
		int there = 0;
		if (channel->kind == FD_INPUT)
			close_channel(channel);
		else if (channel->fd >= 0 && ioctl(channel->fd, FIONREAD, &there) == 0)
			channel->to_drain = (uint32_t)there;
	}
}

static void read_report(struct exec *exec)
{
	struct report report;
	ssize_t n = recv(exec->socket, &report, sizeof report, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) { /* killed: what it leaves is looked for when it is reaped, not before it is reparented */
		close_fd(&exec->socket);
		exec->lost = true;
		if (!exec->supervisor)
			strays_since = earlier(strays_since, now_ns());
		return;
	}
	if (report.what & REPORT_EXIT) {
		exec->report = report;
		main_ended(exec);
	}
	if (report.what & REPORT_GONE) {
		exec->gone = true;
		close_fd(&exec->socket);
		unreaped += exec->supervisor != 0;
	}
	finish(exec);
}

static bool is_supervisor(pid_t pid)
{
	for (size_t i = 0; i < exec_count; i++)
		if (execs[i]->supervisor == pid)
			return true;
	return false;
}

/*
 * Children of a killed supervisor became ours; living supervisors keep their own. (As process 1 of a
 * container we also get orphans of processes that others started there; a lost supervisor ends those too.)
 */
static void hunt_strays(int64_t now)
{
	size_t left = have_proc ? stop_and_kill(agent_pid, is_supervisor) : 0;
	bool give_up = now - strays_since >= GIVE_UP;
	if (left && !give_up)
		return;
	strays_since = NEVER;
	for (size_t i = 0; i < exec_count; i++) {
		struct exec *exec = execs[i];
		if (!exec->lost || exec->supervisor || exec->gone)
			continue;
		if (exec->state == RUNNING) {
			exec->report = (struct report){.cause = CAUSE_SUPERVISOR_LOST, .code = -SIGKILL};
			exec->report.flags = left || !have_proc ? FLAG_SURVIVORS : 0;
			main_ended(exec);
		}
		exec->gone = true;
		finish(exec);
	}
}

static void reap(int64_t now)
{
	for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG | __WALL)) > 0;) {
		for (size_t i = 0; i < exec_count; i++) {
			if (execs[i]->supervisor != pid)
				continue;
			execs[i]->supervisor = 0;
			if (execs[i]->gone)
				unreaped--;
			else if (execs[i]->lost) /* else its last words are still in the socket */
				strays_since = earlier(strays_since, now);
		}
	}
	if (strays_since != NEVER)
		hunt_strays(now);
}

static void order(struct exec *exec, uint8_t what, uint8_t value, uint32_t grace_ms)
{
	struct order message = {what, value, grace_ms};
	if (exec->socket < 0)
		return;
	send_message(exec->socket, &message, sizeof message);
	if (what != ORDER_KILL)
		return;
	if (exec->supervisor)
		kill(exec->supervisor, SIGCONT); /* the command may have stopped it */
	exec->check_at = now_ns() + SECOND;
}

/* A supervisor that the command keeps stopping cannot kill: then it goes first and we do its work. */
static void check_supervisor(struct exec *exec, int64_t now)
{
	char pid[24];
	struct process process;
	snprintf(pid, sizeof pid, "%d", (int)exec->supervisor);
	if (exec->supervisor && read_stat(pid, &process) && (process.state == 'T' || process.state == 't'))
		kill(exec->supervisor, SIGKILL);
	exec->check_at = exec->socket >= 0 ? now + SECOND : NEVER;
}

/* ---------------------------------------------------------------- START */

static struct exec *new_exec(uint32_t id)
{
	struct exec *exec = must(calloc(1, sizeof *exec));
	if (exec_count == exec_room) {
		exec_room = exec_room ? 2 * exec_room : 16;
		execs = must(realloc(execs, exec_room * sizeof *execs));
	}
	execs[exec_count++] = exec;
	exec->id = id;
	exec->socket = -1;
	exec->timer_at = exec->check_at = NEVER;
	return exec;
}

struct fields {
	size_t args, envs, fds;
	bool inherit;
	const char *cwd, *program;
};

/*
 * First look at a START: is it well-formed, and how much does it hold? Strings are moved one byte to
 * the left, over the last byte of their length (0, as no frame is that long), to make room for a NUL:
 * so they need no copies.
 */
static const char *check_fields(uint8_t *p, size_t length, struct fields *fields)
{
	bool listed[256] = {false};
	for (size_t at = 0; at < length;) {
		if (length - at < 5)
			return "START is cut off in a field's head";
		uint8_t tag = p[at], *value = p + at + 5;
		size_t size = get32(p + at + 1);
		if (size > length - at - 5)
			return "START is cut off in a field";
		at += 5 + size;
		if (tag == FIELD_INHERIT) {
			fields->inherit = true;
		} else if (tag == FIELD_FD) {
			if (size < 2 || value[0] > 254 || value[1] > FD_SAME || listed[value[0]])
				return "START has a malformed descriptor";
			if (value[1] == FD_SAME ? size != 3 || !listed[value[2]] : value[1] != FD_CONTENT && size != 2)
				return "START has a malformed descriptor";
			listed[value[0]] = true;
			fields->fds++;
		} else if (tag >= FIELD_ARG && tag <= FIELD_PROGRAM) {
			if (memchr(value, 0, size))
				return "START has a NUL byte in a string";
			memmove(value - 1, value, size);
			value[(ssize_t)size - 1] = 0;
			const char *text = (const char *)value - 1;
			fields->args += tag == FIELD_ARG;
			fields->envs += tag == FIELD_ENV;
			if (tag == FIELD_CWD)
				fields->cwd = size ? text : NULL;
			if (tag == FIELD_PROGRAM)
				fields->program = size ? text : NULL;
		} else {
			return "START has a field of an unknown tag";
		}
	}
	return fields->args ? NULL : "START has no argument";
}

/* The name of `entry` is given anew by one of the ENV fields. */
static bool overridden(const char *entry, char **given, size_t count)
{
	const char *equals = strchr(entry, '=');
	size_t length = equals ? (size_t)(equals - entry) + 1 : strlen(entry);
	for (size_t i = 0; i < count; i++)
		if (strncmp(entry, given[i], length) == 0)
			return true;
	return false;
}

static void inherit_environment(char **env, size_t given)
{
	size_t own = 0, kept = 0;
	while (environ[own])
		own++;
	memmove(env + own, env, given * sizeof *env);
	for (size_t i = 0; i < own; i++)
		if (!overridden(environ[i], env + own, given))
			env[kept++] = environ[i];
	memmove(env + kept, env + own, given * sizeof *env);
	env[kept + given] = NULL;
}

static const char *search_path(char **given, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (strncmp(given[i], "PATH=", 5) == 0)
			return given[i] + 5;
	const char *own = getenv("PATH");
	return own ? own : "/usr/local/bin:/usr/bin:/bin";
}

static int content_file(const uint8_t *content, size_t size)
{
	int fd = note_fd(memfd_create("content", MFD_CLOEXEC));
	for (size_t done = 0; fd >= 0 && done < size;) {
		ssize_t n = pwrite(fd, content + done, size - done, (off_t)done);
		if (n > 0)
			done += (size_t)n;
		else if (n == 0 || errno != EINTR)
			close_fd(&fd);
	}
	return fd;
}

/* A pipe whose one end the process gets; ours does not block. */
static int channel_pipe(struct exec *exec, uint8_t number, uint8_t kind)
{
	int ends[2];
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -1;
	note_fd(ends[0] > ends[1] ? ends[0] : ends[1]);
	int ours = kind == FD_INPUT ? ends[1] : ends[0], theirs = kind == FD_INPUT ? ends[0] : ends[1];
	fcntl(ours, F_SETFL, O_NONBLOCK);
	exec->channels[exec->channel_count++] = (struct channel){
		.number = number, .kind = kind, .fd = ours, .credit = kind == FD_INPUT ? INPUT_CREDIT : OUTPUT_CREDIT};
	return theirs;
}

static int make_fd(struct exec *exec, struct start *start, const uint8_t *value, size_t size)
{
	struct placed_fd *placed = &start->fds[start->fd_count];
	*placed = (struct placed_fd){.number = value[0], .owned = true, .source = -1};
	switch (value[1]) {
	case FD_NULL:
		placed->source = dev_null;
		placed->owned = false;
		break;
	case FD_CONTENT:
		placed->source = content_file(value + 2, size - 2);
		break;
	case FD_SAME:
		for (size_t i = 0; i < start->fd_count; i++)
			if (start->fds[i].number == value[2])
				placed->source = start->fds[i].source;
		placed->owned = false;
		break;
	default:
		placed->source = channel_pipe(exec, value[0], value[1]);
	}
	start->fd_count += placed->source >= 0;
	return placed->source >= 0 ? 0 : -1;
}

/* Second look at a START that is well-formed: collect the strings and make the descriptors. */
static int fill_start(struct exec *exec, struct start *start, uint8_t *p, size_t length)
{
	size_t args = 0, envs = 0;
	bool standard[3] = {false};
	int result = 0, error = 0;
	for (size_t at = 0, size; at < length; at += 5 + size) {
		uint8_t tag = p[at], *value = p + at + 5;
		size = get32(p + at + 1) & 0xffffff; /* the fourth byte may be text by now */
		if (tag == FIELD_ARG)
			start->argv[args++] = (char *)value - 1;
		else if (tag == FIELD_ENV)
			start->env[envs++] = (char *)value - 1;
		else if (tag == FIELD_FD) {
			if (value[0] < 3)
				standard[value[0]] = true;
			if (result == 0 && (result = make_fd(exec, start, value, size)) < 0)
				error = errno;
		}
	}
	for (uint8_t number = 0; number < 3; number++)
		if (!standard[number])
			start->fds[start->fd_count++] = (struct placed_fd){.number = number, .source = dev_null};
	errno = error;
	return result;
}

/* Forks the supervisor. Returns 0, or -1 with errno and with nothing left behind but the channels. */
static int launch(struct exec *exec, struct start *start)
{
	int ends[2];
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
		return -1;
	note_fd(ends[0] > ends[1] ? ends[0] : ends[1]);
	exec->supervisor = fork();
	if (exec->supervisor == 0)
		supervise(start, ends[1]);
	int error = errno;
	close(ends[1]);
	if (exec->supervisor < 0) {
		close(ends[0]);
		exec->supervisor = 0;
		errno = error;
		return -1;
	}
	exec->socket = ends[0];
	return 0;
}

static void start_exec(uint32_t id, uint8_t *payload, size_t length)
{
	struct fields fields = {0};
	const char *wrong = check_fields(payload, length, &fields);
	if (wrong) {
		protocol_error(wrong);
		return;
	}
	struct exec *exec = new_exec(id);
	exec->channels = must(calloc(fields.fds + 1, sizeof *exec->channels));
	size_t own = 0;
	while (fields.inherit && environ[own])
		own++;
	struct start start = {.cwd = fields.cwd};
	start.argv = must(calloc(fields.args + 1, sizeof *start.argv));
	start.env = must(calloc(fields.envs + own + 1, sizeof *start.env));
	int result = fill_start(exec, &start, payload, length);
	start.program = fields.program ? fields.program : start.argv[0];
	start.search = search_path(start.env, fields.envs);
	if (fields.inherit)
		inherit_environment(start.env, fields.envs);
	if (result == 0)
		result = launch(exec, &start);
	int error = errno;
	for (size_t i = 0; i < start.fd_count; i++)
		if (start.fds[i].owned)
			close(start.fds[i].source);
	free(start.argv);
	free(start.env);
	if (result == 0)
		return;
	exec->report = (struct report){.cause = CAUSE_NOT_STARTED, .code = 126};
	set_reason(&exec->report, "the agent cannot start a process", "", error);
	exec->state = EXITED;
	exec->gone = true;
	tell_exit(exec);
	bury(exec);
}

/* ---------------------------------------------------------------- input of a process */

static void give_credit(struct exec *exec, struct channel *channel, size_t passed_on)
{
	channel->owed += (uint32_t)passed_on;
	if (channel->owed < CREDIT_STEP)
		return;
	uint8_t payload[4];
	put(payload, channel->owed, 4);
	channel->credit += channel->owed;
	channel->owed = 0;
	tell(TELL_CREDIT, exec->id, channel->number, payload, sizeof payload);
}

static void nobody_reads(struct exec *exec, struct channel *channel)
{
	close_channel(channel);
	if (!channel->ending)
		tell(TELL_CLOSE, exec->id, channel->number, NULL, 0);
}

/* Writes what the pipe takes and returns how much that was; the channel may be closed afterwards. */
static size_t pass_on(struct exec *exec, struct channel *channel, const uint8_t *data, size_t length)
{
	size_t done = 0;
	while (done < length) {
		ssize_t n = write(channel->fd, data + done, length - done);
		if (n >= 0)
			done += (size_t)n;
		else if (errno == EAGAIN)
			break;
		else if (errno != EINTR) {
			nobody_reads(exec, channel);
			return length;
		}
	}
	give_credit(exec, channel, done);
	return done;
}

static void take_input(struct exec *exec, struct channel *channel, const uint8_t *data, size_t length)
{
	size_t done = channel->waiting_length ? 0 : pass_on(exec, channel, data, length);
	if (done == length)
		return;
	/* Credit bounds what can wait, so one allocation of that size serves the channel for good. */
	if (!channel->waiting)
		channel->waiting = must(malloc(INPUT_CREDIT));
	if (channel->waiting_at) {
		memmove(channel->waiting, channel->waiting + channel->waiting_at, channel->waiting_length);
		channel->waiting_at = 0;
	}
	memcpy(channel->waiting + channel->waiting_length, data + done, length - done);
	channel->waiting_length += length - done;
}

static void feed(struct exec *exec, struct channel *channel)
{
	size_t done = pass_on(exec, channel, channel->waiting + channel->waiting_at, channel->waiting_length);
	if (channel->fd < 0)
		return;
	channel->waiting_at += done;
	channel->waiting_length -= done;
	if (!channel->waiting_length)
		channel->waiting_at = 0;
	if (!channel->waiting_length && channel->ending)
		close_channel(channel);
}

/* ---------------------------------------------------------------- frames from the client */

static void on_data(struct exec *exec, struct channel *channel, const uint8_t *data, size_t length)
{
	if (channel->ending || length > channel->credit) {
		protocol_error(channel->ending ? "DATA after CLOSE" : "DATA beyond the credit");
		return;
	}
	channel->credit -= (uint32_t)length;
	if (channel->fd >= 0)
		take_input(exec, channel, data, length);
}

static void on_close(struct channel *channel)
{
	channel->ending = true;
	if (!channel->waiting_length)
		close_channel(channel);
}

static void on_credit(struct channel *channel, uint32_t amount)
{
	if (amount > OUTPUT_CREDIT - channel->credit)
		protocol_error("CREDIT for more than was sent");
	else
		channel->credit += amount;
}

static void on_channel_frame(struct exec *exec, uint8_t type, uint8_t number, uint8_t *p, size_t length)
{
	struct channel *channel = find_channel(exec, number, type == ASK_CREDIT ? FD_OUTPUT : FD_INPUT);
	if (!channel)
		protocol_error("a frame for a channel that the exec does not have");
	else if (exec->state != RUNNING && type != ASK_CREDIT)
		return; /* it was on its way when the process ended */
	else if (type == ASK_DATA)
		on_data(exec, channel, p, length);
	else if (type == ASK_CLOSE)
		on_close(channel);
	else {
		on_credit(channel, get32(p));
		finish(exec);
	}
}

static void on_timer(struct exec *exec, uint32_t after_ms, uint32_t grace_ms)
{
	if (exec->state != RUNNING)
		return;
	exec->timer_at = after_ms ? now_ns() + after_ms * MS : NEVER;
	exec->timer_grace_ms = grace_ms;
}

static bool length_fits(uint8_t type, size_t length)
{
	switch (type) {
	case ASK_CLOSE:
		return length == 0;
	case ASK_SIGNAL:
		return length == 1;
	case ASK_CREDIT:
	case ASK_KILL:
		return length == 4;
	case ASK_TIMER:
		return length == 8;
	default:
		return type == ASK_START || type == ASK_DATA;
	}
}

static void on_frame(uint8_t type, uint8_t number, uint32_t id, uint8_t *p, size_t length)
{
	struct exec *exec = find_exec(id);
	if (type == ASK_START && (exec || !id))
		protocol_error(exec ? "START with an id that is in use" : "START without an id");
	else if (type == ASK_START)
		start_exec(id, p, length);
	else if (!exec)
		return;
	else if (type == ASK_SIGNAL && p[0] >= 1 && p[0] < NSIG)
		order(exec, ORDER_SIGNAL, p[0], 0);
	else if (type == ASK_SIGNAL)
		protocol_error("SIGNAL with a number that is no signal");
	else if (type == ASK_KILL)
		order(exec, ORDER_KILL, CAUSE_KILL, get32(p));
	else if (type == ASK_TIMER)
		on_timer(exec, get32(p), get32(p + 4));
	else
		on_channel_frame(exec, type, number, p, length);
}

static struct {
	uint8_t bytes[HEADER + MAX_PAYLOAD];
	size_t length;
	bool greeted;
} in;

static const uint8_t preamble[8] = {0, 'H', 'C', 'R', 'A', 'B', VERSION & 255, VERSION >> 8};

/* Returns how many bytes at `p` were used; 0 when more are needed. */
static size_t take_frame(uint8_t *p, size_t length)
{
	if (!in.greeted) {
		size_t seen = smaller(length, sizeof preamble);
		if (memcmp(p, preamble, seen) != 0)
			protocol_error(seen <= 6 || memcmp(p, preamble, 6) ? "the stream does not begin with the preamble"
			                                                   : "this agent speaks version 1 only");
		in.greeted = seen == sizeof preamble;
		return in.greeted ? seen : 0;
	}
	if (length < HEADER)
		return 0;
	size_t size = get32(p);
	if (size > MAX_PAYLOAD || p[6] || p[7] || !length_fits(p[4], size)) {
		protocol_error(size > MAX_PAYLOAD ? "a frame is too long" : "a malformed frame");
		return 0;
	}
	if (length - HEADER < size)
		return 0;
	on_frame(p[4], p[5], get32(p + 8), p + HEADER, size);
	return HEADER + size;
}

static void read_client(void)
{
	ssize_t n = read(0, in.bytes + in.length, sizeof in.bytes - in.length);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		closing = true;
		return;
	}
	in.length += (size_t)n;
	size_t at = 0;
	for (size_t used; at < in.length && !exit_status && (used = take_frame(in.bytes + at, in.length - at)); at += used)
		;
	in.length -= at;
	memmove(in.bytes, in.bytes + at, in.length);
}

/* ---------------------------------------------------------------- the loop */

struct watched {
	struct exec *exec;
	struct channel *channel; /* NULL for the supervisor's socket */
};

static struct pollfd *polled;
static struct watched *watched;
static size_t watch_count, watch_room;

static void watch(int fd, short events, struct exec *exec, struct channel *channel)
{
	if (watch_count == watch_room) {
		watch_room = watch_room ? 2 * watch_room : 64;
		polled = must(realloc(polled, watch_room * sizeof *polled));
		watched = must(realloc(watched, watch_room * sizeof *watched));
	}
	polled[watch_count] = (struct pollfd){.fd = fd, .events = events};
	watched[watch_count++] = (struct watched){exec, channel};
}

static bool dropping(const struct exec *exec) { return exec->state == EXITED || out.sealed; }

static void watch_channel(struct exec *exec, struct channel *channel)
{
	if (channel->fd < 0)
		return;
	if (channel->kind == FD_INPUT) {
		/* Without events it still tells that the last reader went away. */
		if (channel->waiting_length || !exec->held_until)
			watch(channel->fd, channel->waiting_length ? POLLOUT : 0, exec, channel);
	} else if (dropping(exec)) {
		watch(channel->fd, POLLIN, exec, channel);
	} else if (!exec->held_until && !out_pending() && may_take(exec, channel)) {
		watch(channel->fd, POLLIN, exec, channel);
	}
}

/* Everything to wait for, in `polled`; returns until when. Slots 0 and 1 are the client. */
static int64_t watch_all(void)
{
	int64_t until = closing ? close_by : NEVER;
	watch_count = 0;
	watch(closing || out.length - out.at > BACKLOG ? -1 : 0, POLLIN, NULL, NULL);
	watch(out_pending() ? 1 : -1, POLLOUT, NULL, NULL);
	for (size_t i = 0; i < exec_count; i++) {
		struct exec *exec = execs[i];
		if (exec->socket >= 0)
			watch(exec->socket, POLLIN, exec, NULL);
		until = earlier(until, earlier(exec->timer_at, exec->check_at));
		if (exec->held_until)
			until = earlier(until, exec->held_until);
		for (size_t c = 0; c < exec->channel_count; c++)
			watch_channel(exec, &exec->channels[c]);
	}
	if (strays_since != NEVER)
		until = earlier(until, now_ns() + 20 * MS);
	return until;
}

/*
 * A command's last output, its state and its exit come within a fraction of a millisecond. The first
 * output after a silence is therefore left in the pipe for a moment: mostly EXIT can join it in one
 * write, and the client wakes up once. Whoever keeps talking is not held.
 */
static bool hold(struct exec *exec, const struct channel *channel, int64_t now)
{
	if (exec->state != RUNNING || now - exec->active_at < QUIET)
		return false;
	exec->active_at = now;
	exec->held_until = now + (channel->number > 2 ? HOLD_STATE : HOLD);
	return true;
}

static void on_channel_event(struct exec *exec, struct channel *channel, short events, int64_t now)
{
	if (channel->kind == FD_INPUT && channel->waiting_length)
		feed(exec, channel);
	else if (channel->kind == FD_OUTPUT && dropping(exec))
		drop_output(channel);
	else if (hold(exec, channel, now))
		return;
	else if (channel->kind == FD_INPUT && events & (POLLERR | POLLNVAL))
		nobody_reads(exec, channel);
	else if (channel->kind == FD_OUTPUT && may_take(exec, channel) && !out.blocked && out.length - out.at <= GATHER) {
		exec->active_at = now;
		take_output(exec, channel);
		finish(exec);
	}
}

static void on_times(int64_t now)
{
	for (size_t i = 0; i < exec_count; i++) {
		struct exec *exec = execs[i];
		if (exec->held_until && now >= exec->held_until)
			exec->held_until = 0;
		if (now >= exec->timer_at) {
			exec->timer_at = NEVER;
			order(exec, ORDER_KILL, CAUSE_TIMER, (uint32_t)exec->timer_grace_ms);
		}
		if (now >= exec->check_at)
			check_supervisor(exec, now);
	}
}

static void free_dead(void)
{
	size_t kept = 0;
	for (size_t i = 0; i < exec_count; i++) {
		struct exec *exec = execs[i];
		/* An unreaped supervisor must stay known, or its pid would be taken for a stray's. */
		if (!exec->dead || exec->supervisor) {
			execs[kept++] = exec;
			continue;
		}
		free(exec->channels);
		free(exec);
	}
	exec_count = kept;
}

/* Ends everything. Returns whether there is nothing left to wait for. */
static bool close_down(int64_t now)
{
	bool alive = false;
	if (close_by == NEVER) {
		close_by = now + 5 * SECOND;
		for (size_t i = 0; i < exec_count; i++)
			order(execs[i], ORDER_KILL, CAUSE_KILL, LOST_GRACE_MS);
	}
	for (size_t i = 0; i < exec_count; i++)
		alive |= !execs[i]->gone;
	if (!alive) /* what the client does not read soon it will not read */
		close_by = earlier(close_by, now + SECOND);
	return now >= close_by || (!alive && !out_pending());
}

static void run(void)
{
	size_t turn = 0;
	for (;;) {
		flush();
		free_dead();
		if (asked_to_end)
			closing = true;
		if (closing && close_down(now_ns()))
			return;
		int64_t until = watch_all();
		bool expecting_children = unreaped || strays_since != NEVER;
		for (size_t i = 0; i < exec_count; i++)
			expecting_children |= execs[i]->lost;
		int ready = wait_for(polled, watch_count, until, expecting_children ? &all_open : &child_blocked);
		int64_t now = now_ns();
		if (expecting_children)
			reap(now);
		on_times(now);
		if (ready <= 0)
			continue;
		if (polled[1].revents)
			flush();
		if (polled[0].revents)
			read_client();
		/* Each turn begins with another one, or the loudest exec would silence those behind it. */
		turn++;
		for (size_t n = watch_count - 2, step = 0; step < n; step++) {
			size_t i = 2 + (turn + step) % n;
			struct exec *exec = watched[i].exec;
			struct channel *channel = watched[i].channel;
			if (!polled[i].revents || exec->dead)
				continue;
			if (!channel && exec->socket >= 0)
				read_report(exec);
			else if (channel && channel->fd >= 0)
				on_channel_event(exec, channel, polled[i].revents, now);
		}
	}
}

/* ---------------------------------------------------------------- start-up */

/* SIGTERM ends the agent as end of file does. A supervisor has the same handler and does not look. */
static void on_signal(int number)
{
	if (number == SIGTERM)
		asked_to_end = 1;
}

/*
 * A handler that does nothing, not SIG_IGN: execve turns it back into the default, so commands begin
 * clean. It keeps ^C in the client's terminal and `kill $PPID` in a command from ending us.
 */
static void set_signals(void)
{
	static const int harmless[] = {SIGHUP,  SIGINT,  SIGQUIT, SIGPIPE, SIGALRM, SIGTERM, SIGUSR1, SIGUSR2,
	                               SIGTSTP, SIGTTIN, SIGTTOU, SIGCHLD, SIGPROF, SIGVTALRM, SIGIO, SIGXCPU};
	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL); /* whatever our starter ignored */
	struct sigaction action = {.sa_handler = on_signal};
	for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++)
		sigaction(harmless[i], &action, NULL);
	sigemptyset(&all_open);
	sigemptyset(&child_blocked);
	sigaddset(&child_blocked, SIGCHLD);
	/* Both are let in only while we wait, so that none comes between looking and waiting. */
	sigset_t mask = child_blocked;
	sigaddset(&mask, SIGTERM);
	sigprocmask(SIG_SETMASK, &mask, NULL);
}

/* A root without /dev: an empty file that nobody can write to reads the same. */
static int open_null(void)
{
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (fd < 0 && (fd = memfd_create("null", MFD_CLOEXEC | MFD_ALLOW_SEALING)) >= 0)
		fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
	return note_fd(fd);
}

/* Whether /proc is there and shows the processes as we number them. */
static bool proc_is_ours(void)
{
	char text[32] = "";
	return readlink("/proc/self", text, sizeof text - 1) > 0 && atoi(text) == (int)agent_pid;
}

static void raise_fd_limit(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &original_nofile) < 0)
		return;
	limit = original_nofile;
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
}

static void greet(void)
{
	struct utsname name;
	uint8_t payload[8 + sizeof name.machine];
	uint32_t features = prctl(PR_SET_CHILD_SUBREAPER, 1) == 0 ? FEATURE_SUBREAPER : 0;
	if (have_proc)
		features |= FEATURE_SEES_ALL;
	if (uname(&name) < 0)
		name.machine[0] = 0;
	size_t length = strlen(name.machine);
	put(payload, features, 4);
	put(payload + 4, (uint32_t)agent_pid, 4);
	memcpy(payload + 8, name.machine, length);
	memcpy(out_reserve(sizeof preamble), preamble, sizeof preamble);
	out.length += sizeof preamble;
	tell(TELL_HELLO, 0, 0, payload, 8 + length);
}

int main(int argc, char **argv)
{
	if (argc == 2 && strcmp(argv[1], "--version") == 0)
		return puts("hermitcrab-agent 1") < 0;
	if (argc != 1) {
		fputs("usage: hermitcrab-agent [--version]\n", stderr);
		return 2;
	}
	agent_pid = getpid();
	highest_fd = 1023; /* what we inherited, where close_range is missing */
	close_from(3);
	highest_fd = 2;
	fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
	fcntl(1, F_SETFL, fcntl(1, F_GETFL) | O_NONBLOCK);
	set_signals();
	raise_fd_limit();
	have_proc = proc_is_ours();
	dev_null = open_null();
	if (dev_null < 0)
		return 1;
	greet();
	run();
	return exit_status;
}
