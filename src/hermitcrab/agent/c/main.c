/*
 * hermitcrab-agent: starts processes for a client over one byte pipe, carries their descriptors and
 * ends them.
 *
 *   agent [--lease SECONDS] [--unlink] [--text]
 *                                         speak the protocol on stdin and stdout
 *   agent --serve PATH [--lease SECONDS]  speak it on a socket, with one client after another (detached.c)
 *   agent --connect PATH                  be the pipe to such an agent (relay.c)
 *   agent --join PATH [--lease SECONDS] [--unlink] [--text]
 *                                         the same; where none serves there, start one first
 *   agent --files VERB ...                work on files: a program of its own (tools.c)
 *   agent --version                       print the version
 *
 * --lease: end as at end of file when no byte came from the client for so long. --unlink: remove our own file.
 * --text: send lines of base64.
 *
 * Exit status: 0 at end of file (or SIGTERM, or when nobody reads us), 3 after a protocol error, 2 for
 * a wrong command line, 1 when even starting up failed.
 *
 * Three kinds of process run this program:
 *
 *   agent       one poll loop, below; owns the client's pipe (wire.c) and our ends of all children's
 *               pipes (channel.c), and keeps the execs (exec.c)
 *   supervisor  one per exec, forked by start.c or a spare one (supervisor.c, spare.c)
 *   command     forked by its supervisor, until execve (command.c)
 *
 * It must work in an empty root file system: static, no files needed, /proc and /dev used when there.
 */
#include "agent.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/utsname.h>

#define QUIET (20 * MS)     /* an exec silent for that long ... */
#define HOLD (MS / 2)       /* ... has what comes next held for that long */

pid_t agent_pid;
bool have_subreapers;
bool have_proc;
int dev_null;
struct rlimit original_nofile;
volatile sig_atomic_t closing;

struct watched {
	struct exec *exec;
	struct channel *channel; /* NULL for the supervisor's socket */
};

static struct pollfd *polled;
static struct watched *watched;
static size_t watch_count, watch_room;

void watch(int fd, short events, struct exec *exec, struct channel *channel) {
	if (watch_count == watch_room) {
		watch_room = watch_room ? 2 * watch_room : 64;
		polled = must(realloc(polled, watch_room * sizeof *polled));
		watched = must(realloc(watched, watch_room * sizeof *watched));
	}
	polled[watch_count] = (struct pollfd){.fd = fd, .events = events};
	watched[watch_count++] = (struct watched){exec, channel};
}

/* What background children print after the main process has ended. */
static bool dropping(const struct exec *exec, const struct channel *channel) {
	return channel->kind == FD_OUTPUT && (sealed || (exec->state != RUNNING && !channel->left));
}

static void watch_channel(struct exec *exec, struct channel *channel, int64_t now) {
	if (channel->waiting_length)
		watch(channel->fd, POLLOUT, exec, channel);
	else if (dropping(exec, channel))
		watch(channel->fd, POLLIN, exec, channel);
	else if (exec->state != RUNNING || now < exec->listen_at)
		return;
	else if (channel->kind == FD_INPUT && !channel->terminal)
		watch(channel->fd, 0, exec, channel); /* tells all the same that its last reader went away */
	else if (may_take(channel) && !queued())
		watch(channel->fd, POLLIN, exec, channel);
}

/* Everything to wait for, in `polled`; returns until when. Slots 0 and 1 are the client. */
static int64_t watch_all(int64_t now) {
	int64_t until = earlier(expire_spares(now), closing ? NEVER : lease_end());
	watch_count = 0;
	watch(closing || !attached || queued() > BACKLOG ? -1 : 0, POLLIN, NULL, NULL);
	watch(queued() ? 1 : -1, POLLOUT, NULL, NULL);
	if (serving && !closing)
		watch_newcomers();
	for (struct exec *exec = execs; exec; exec = exec->next) {
		until = earlier(until, earlier(exec->timer_at, exec->check_at));
		if (exec->state == RUNNING && now < exec->listen_at)
			until = earlier(until, exec->listen_at);
		if (is_orphaned(exec))
			until = earlier(until, now + RESCAN);
		if (exec->socket >= 0)
			watch(exec->socket, POLLIN, exec, NULL);
		for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
			if (channel->fd >= 0)
				watch_channel(exec, channel, now);
	}
	return until;
}

/*
 * A command's last output and its exit come within a fraction of a millisecond of each other. What comes
 * after a silence is therefore left in the pipe for a moment: mostly EXIT can join it in one write,
 * and the client wakes up once. Whoever keeps talking is not held.
 */
static bool listening(struct exec *exec, int64_t now) {
	if (now - exec->listen_at > QUIET)
		exec->listen_at = now + HOLD;
	return now >= exec->listen_at;
}

static void on_channel_event(struct exec *exec, struct channel *channel, int64_t now) {
	if (channel->waiting_length) {
		feed(exec, channel);
	} else if (dropping(exec, channel)) {
		drop_output(channel);
	} else if (exec->state != RUNNING || !listening(exec, now)) {
		return;
	} else if (channel->kind == FD_INPUT) {
		nobody_reads(exec, channel);
	} else if (may_take(channel) && queued() <= GATHER) {
		exec->listen_at = now;
		take_output(exec, channel);
	}
}

static void on_events(int64_t now) {
	static size_t turn;
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
		if (!polled[i].revents)
			continue;
		if (!exec)
			on_newcomer(polled[i].fd);
		else if (!channel)
			read_report(exec);
		else if (channel->fd >= 0)
			on_channel_event(exec, channel, now);
	}
}

static void on_times(int64_t now) {
	for (struct exec *exec = execs; exec; exec = exec->next) {
		if (now >= exec->timer_at) {
			exec->timer_at = NEVER;
			give_order(exec, ORDER_KILL, CAUSE_TIMER, exec->timer_grace_ms);
		}
		if (now >= exec->check_at)
			check_supervisor(exec, now);
	}
}

/* Ends everything. Returns when to stop waiting for that: now, when nothing is left. */
static int64_t close_down(int64_t now) {
	static int64_t close_by = NEVER;
	bool alive = false;
	if (close_by == NEVER) {
		close_by = now + 5 * SECOND;
		for (struct exec *exec = execs; exec; exec = exec->next)
			give_order(exec, ORDER_KILL, CAUSE_KILL, LOST_GRACE_MS);
	}
	for (struct exec *exec = execs; exec; exec = exec->next)
		alive |= !exec->gone;
	if (!alive) /* what the client does not read soon it will not read */
		close_by = earlier(close_by, queued() ? now + SECOND : now);
	return close_by;
}

static void run(void) {
	for (;;) {
		if (lost_client())
			detach();
		settle_execs();
		if (serving)
			forget_oldest();
		flush(); /* before reaping: the client waits for it */
		reap_supervisors();
		if (hunt_strays())
			continue;
		int64_t now = now_ns(), close_by = closing ? close_down(now) : NEVER;
		if (now >= close_by)
			return;
		int64_t until = earlier(close_by, watch_all(now));
		int ready = wait_until(until, polled, watch_count);
		now = now_ns();
		on_times(now);
		if (ready > 0)
			on_events(now);
		/* Only now, with what came while we were frozen read. */
		if (ready >= 0 && !closing && now >= lease_end())
			end_lease();
	}
}

/* SIGTERM ends the agent as end of file does. A supervisor has the same handler and does not look. */
static void on_signal(int number) {
	if (number == SIGTERM)
		closing = true;
}

/*
 * A handler that does nothing, not SIG_IGN: execve turns it back into the default, so commands begin
 * clean. It keeps ^C in the client's terminal and `kill $PPID` in a command from ending us.
 */
static void set_signals(void) {
	struct sigaction harmless = {.sa_handler = on_signal};
	for (int number = 1; number < NSIG; number++)
		sigaction(number, &harmless, NULL);
	static const int faults[] = {SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS};
	for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
		signal(faults[i], SIG_DFL);
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGCHLD);
	sigaddset(&blocked, SIGTERM);
	sigprocmask(SIG_SETMASK, &blocked, NULL);
}

static void raise_fd_limit(void) {
	if (getrlimit(RLIMIT_NOFILE, &original_nofile) < 0)
		return;
	struct rlimit limit = original_nofile;
	limit.rlim_cur = smaller(limit.rlim_max, MAX_FDS);
	setrlimit(RLIMIT_NOFILE, &limit);
}

/* A root without /dev: an empty file that nobody can write to reads the same. */
static int open_null(void) {
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (fd < 0 && (fd = memfd_create("null", MFD_CLOEXEC | MFD_ALLOW_SEALING)) >= 0)
		fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
	return fd;
}

static bool proc_is_ours(void) {
	char text[32] = "";
	return readlink("/proc/self", text, sizeof text - 1) > 0 && atoi(text) == (int)agent_pid;
}

void say_hello(void) {
	struct utsname name = {0};
	struct {
		uint32_t features, pid;
		char machine[sizeof name.machine];
	} hello = {.features = FEATURE_TERMINALS | FEATURE_FILES | FEATURE_DETACHED, .pid = (uint32_t)agent_pid};
	if (have_subreapers)
		hello.features |= FEATURE_SUBREAPER;
	if (have_proc)
		hello.features |= FEATURE_SEES_ALL;
	if (have_proc && access("/proc/self/exe", X_OK) == 0)
		hello.features |= FEATURE_TOOLS;
	uname(&name);
	memcpy(hello.machine, name.machine, sizeof hello.machine);
	greet(&hello, 8 + strlen(hello.machine));
}

int main(int argc, char **argv) {
	struct options options = {0};
	if (argc == 2 && strcmp(argv[1], "--version") == 0)
		return puts("hermitcrab-agent 1") < 0;
	if (argc > 2 && strcmp(argv[1], "--files") == 0)
		return run_tool(argc - 2, argv + 2);
	if (!read_options(argv, &options)) {
		fputs("usage: hermitcrab-agent [--lease SECONDS] [--unlink] [--text] | --serve PATH [--lease SECONDS] | "
		      "--connect PATH | --join PATH [--lease SECONDS] [--unlink] [--text] | --files VERB ... | --version\n", stderr);
		return 2;
	}
	if (options.connect)
		return relay(options.connect, false);
	if (options.unlink)
		unlink_self(argv[0]);
	close_from(3);
	if (options.join && !serve_apart(options.join))
		return relay(options.join, options.text);
	agent_pid = getpid();
	fcntl(0, F_SETFL, fcntl(0, F_GETFL) | O_NONBLOCK);
	fcntl(1, F_SETFL, fcntl(1, F_GETFL) | O_NONBLOCK);
	set_signals();
	raise_fd_limit();
	have_subreapers = prctl(PR_SET_CHILD_SUBREAPER, 1) == 0;
	have_proc = proc_is_ours();
	dev_null = open_null();
	if (dev_null < 0)
		return 1;
	const char *path = options.join ? options.join : options.serve;
	as_text = options.text && !path;
	set_lease(options.lease);
	if (!path)
		say_hello();
	else if (!begin_serving(path))
		return 1;
	flush(); /* the client waits for it */
	remember_standing();
	begin_counting_kills();
	run();
	expire_spares(NEVER);
	end_serving();
	return exit_status;
}
