/*
 * The supervisor of one exec: a child subreaper, so that everything the command starts stays below it.
 * It reaps, reports to the agent over a socket, and kills. When its last descendant has ended it ends too, or
 * waits for another exec (spare.c): only when nothing is unusual, and not for ever.
 */
#include "agent.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define SERVICE (10 * SECOND) /* after that a new one is forked, from the agent as it is then */

static struct self {
	const struct start *start;
	int socket; /* to the agent, -1 when it is gone */
	pid_t main_pid;
	int64_t started;
	bool main_ended, exit_sent, asked_again;
	struct ending ending;
	enum { NOT_KILLING, ASKING, FORCING, GAVE_UP } phase;
	int64_t step_at;     /* ASKING: when the grace ends. FORCING: when to look again */
	int64_t progress_at; /* when something ended last */
} self;

static int64_t born;

/* A SIGKILL leaves nothing time to fork away. Without /proc the main process's group is all that we know of. */
static void signal_all(int number) {
	if (!have_proc)
		kill(-self.main_pid, number);
	else if (number == SIGKILL)
		kill_descendants(getpid(), NULL);
	else
		signal_descendants(getpid(), number);
}

static uint64_t microseconds(struct timeval t) { return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_usec; }

static void main_ended(int status, const struct rusage *usage) {
	struct ending *ending = &self.ending;
	self.main_ended = true;
	ending->code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
	ending->user_us = microseconds(usage->ru_utime);
	ending->system_us = microseconds(usage->ru_stime);
	ending->peak_kib = (uint64_t)usage->ru_maxrss;
	ending->wall_us = (uint64_t)(now_ns() - self.started) / 1000;
	if (WIFEXITED(status))
		explain_failure(self.start, ending);
}

/* Returns whether a child is left. */
static bool reap(void) {
	for (;;) {
		int status;
		struct rusage usage;
		pid_t pid = wait4(-1, &status, WNOHANG | __WALL, &usage);
		if (pid <= 0)
			return pid == 0;
		self.progress_at = now_ns();
		if (pid == self.main_pid)
			main_ended(status, &usage);
	}
}

/* Returns whether it said that we may serve again. */
static bool report(bool gone) {
	bool spare = gone && self.phase == NOT_KILLING && have_subreapers && now_ns() - born < SERVICE;
	struct report message = {.exited = !self.exit_sent, .gone = gone, .spare = spare, .ending = self.ending};
	self.exit_sent = true;
	if (self.socket >= 0)
		send(self.socket, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
	return spare;
}

static void begin_kill(uint32_t cause, uint32_t grace_ms) {
	int64_t force_at = now_ns() + grace_ms * MS;
	if (self.phase == ASKING)
		self.step_at = earlier(self.step_at, force_at);
	if (self.phase == ASKING || self.phase == FORCING)
		return;
	self.phase = ASKING;
	self.step_at = force_at;
	if (!self.main_ended)
		self.ending.cause = (uint8_t)cause;
	if (grace_ms) {
		signal_all(SIGTERM);
		signal_all(SIGCONT); /* a stopped process cannot answer */
	}
}

static void give_up(int64_t now) {
	self.phase = GAVE_UP;
	if (self.socket < 0)
		_exit(0);
	if (self.exit_sent)
		return;
	self.ending.flags |= FLAG_SURVIVORS;
	if (!self.main_ended) {
		self.ending.code = -SIGKILL;
		self.ending.wall_us = (uint64_t)(now - self.started) / 1000;
	}
	report(false);
}

/* What the main process started between our TERM and its end has not heard of it. */
static void ask_again(void) {
	if (self.phase != ASKING || !self.main_ended || self.asked_again)
		return;
	self.asked_again = true;
	signal_all(SIGTERM);
	signal_all(SIGCONT);
}

/* The next step of a kill that is under way, when it is due. */
static void continue_kill(void) {
	int64_t now = now_ns();
	if ((self.phase != ASKING && self.phase != FORCING) || now < self.step_at)
		return;
	if (self.phase == ASKING)
		self.progress_at = now;
	self.phase = FORCING;
	signal_all(SIGKILL);
	self.step_at = now_ns() + RESCAN;
	if (now - self.progress_at >= GIVE_UP)
		give_up(now);
}

static void take_orders(void) {
	struct order order;
	ssize_t n;
	while ((n = recv(self.socket, &order, sizeof order, MSG_DONTWAIT)) == (ssize_t)sizeof order) {
		if (order.what == ORDER_SIGNAL)
			signal_all((int)order.value);
		else
			begin_kill(order.value, order.grace_ms);
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	close_fd(&self.socket);
	if (self.phase == GAVE_UP)
		_exit(0);
	begin_kill(CAUSE_KILL, LOST_GRACE_MS);
}

static void begin(const struct start *start) {
	self = (struct self){.start = start, .socket = self.socket, .started = now_ns()};
	self.main_pid = start_command(start);
	if (self.main_pid < 0)
		not_started(&self.ending, 126, "cannot start a process", "", errno);
}

/* Returns when nothing of it is left. */
static void watch_over(void) {
	while (reap()) {
		if (self.main_ended && !self.exit_sent && self.phase == NOT_KILLING)
			report(false);
		ask_again();
		continue_kill();
		bool killing = self.phase == ASKING || self.phase == FORCING;
		struct pollfd agent = {.fd = self.socket, .events = POLLIN};
		if (wait_until(killing ? self.step_at : NEVER, &agent, 1) > 0) {
			reap(); /* what ended before the order came ended by itself */
			take_orders();
		}
	}
}

_Noreturn void supervise(const struct start *start, int socket) {
	static struct start next;
	prctl(PR_SET_NAME, "crab-supervisor");
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	born = now_ns();
	begin(start);
	self.socket = dup2(socket, 0);
	dev_null = dup2(dev_null, 1);
	for (;;) {
		close_from(2); /* any descriptor that we kept would delay somebody's end of file */
		watch_over();
		/* The next command must find everything as the first one found it. */
		if (!report(true) || !has_usual_standing() || !take_job(self.socket, &next))
			_exit(0);
		begin(&next);
	}
}
