/* What the agent knows of each exec, and how an exec ends. */
#include "agent.h"

#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

struct exec *execs;

struct exec *add_exec(uint32_t id) {
	struct exec *exec = must(malloc(sizeof *exec));
	*exec = (struct exec){.next = execs, .id = id, .socket = -1, .timer_at = NEVER, .check_at = NEVER};
	exec->forgotten = !serving;
	return execs = exec;
}

struct exec *find_exec(uint32_t id) {
	struct exec *exec = id ? execs : NULL;
	while (exec && (exec->id != id || (exec->state == BURIED && exec->forgotten)))
		exec = exec->next;
	return exec;
}

static void rewind_file(struct channel *channel) {
	off_t size = channel->fd < 0 ? 0 : lseek(channel->fd, 0, SEEK_END);
	if (size > 0 && lseek(channel->fd, 0, SEEK_SET) == 0)
		channel->left = smaller((size_t)size, LARGEST_FILE);
}

/* The main process ended, or never began. */
void begin_end(struct exec *exec, const struct ending *ending) {
	exec->ending = *ending;
	bool killed = ending->code == -SIGKILL || ending->code == 128 + SIGKILL; /* the latter says a shell */
	if (killed && memory_ran_out())
		exec->ending.flags |= FLAG_OUT_OF_MEMORY;
	exec->state = DRAINING;
	exec->timer_at = NEVER;
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++) {
		int there = 0;
		if (channel->kind == FD_INPUT)
			close_channel(channel);
		else if (channel->kind == FD_FILE)
			rewind_file(channel);
		else if (channel->terminal)
			channel->left = channel->fd < 0 ? 0 : TERMINAL_HOLDS; /* at most: it ends earlier, at EAGAIN */
		else if (channel->fd >= 0 && ioctl(channel->fd, FIONREAD, &there) == 0)
			channel->left = (uint64_t)there;
	}
}

/* Returns whether everything that comes before EXIT is on its way. */
static bool drain(struct exec *exec) {
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++) {
		while (!sealed && may_take(channel)) {
			if (queued() > GATHER && !flush())
				return false;
			take_output(exec, channel);
		}
		if (!sealed && channel->left)
			return false;
	}
	return true;
}

/* Somebody may still print, whom the supervisor does not know of. */
static bool is_written_to(const struct exec *exec) {
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
		if (channel->kind == FD_OUTPUT && channel->fd >= 0)
			return true;
	return false;
}

static void settle(struct exec *exec) {
	if (exec->state == DRAINING && drain(exec) && attached) {
		const struct ending *ending = &exec->ending;
		tell(TELL_EXIT, exec->id, 0, ending, offsetof(struct ending, reason) + strlen(ending->reason));
		exec->state = EXITED;
	}
	if (exec->state == EXITED && exec->gone && (have_subreapers || !is_written_to(exec))) {
		if (exec->id)
			tell(TELL_GONE, exec->id, 0, NULL, 0);
		for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++)
			if (exec->forgotten || channel->kind != FD_FILE) /* which may be asked for again */
				close_channel(channel);
		exec->state = BURIED;
	}
}

static void free_exec(struct exec *exec) {
	for (struct channel *channel = exec->channels; channel < end_of_channels(exec); channel++) {
		close_channel(channel);
		free(channel->kept.bytes);
	}
	free(exec->channels);
	free(exec);
}

/* Tells the client of every exec as much as can be told now, and forgets those that are over. */
void settle_execs(void) {
	for (struct exec **at = &execs, *exec; (exec = *at);) {
		settle(exec);
		/* An unreaped supervisor must stay known, or it would be taken for a stray. */
		if (exec->state != BURIED || exec->supervisor || !exec->forgotten) {
			at = &exec->next;
			continue;
		}
		*at = exec->next;
		free_exec(exec);
	}
}

void read_report(struct exec *exec) {
	struct report report;
	ssize_t n = recv(exec->socket, &report, sizeof report, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n != (ssize_t)sizeof report) { /* it was killed */
		close_fd(&exec->socket);
		exec->give_up_at = now_ns() + GIVE_UP;
		return;
	}
	if (report.exited)
		begin_end(exec, &report.ending);
	if (report.gone) {
		exec->gone = true;
		if (report.spare && !closing)
			keep_spare(exec);
		close_fd(&exec->socket);
	}
}

void give_order(struct exec *exec, uint32_t what, uint32_t value, uint32_t grace_ms) {
	struct order order = {what, value, grace_ms};
	if (exec->transfer && what == ORDER_KILL)
		cancel_transfer(exec, value);
	if (exec->socket < 0)
		return;
	send(exec->socket, &order, sizeof order, MSG_NOSIGNAL | MSG_DONTWAIT);
	if (what != ORDER_KILL)
		return;
	if (exec->supervisor)
		kill(exec->supervisor, SIGCONT); /* the command may have stopped it */
	exec->check_at = now_ns() + SECOND;
}

/* A supervisor that the command keeps stopping cannot kill: then it goes first and we do its work. */
void check_supervisor(struct exec *exec, int64_t now) {
	if (exec->supervisor && is_stopped(exec->supervisor))
		kill(exec->supervisor, SIGKILL);
	exec->check_at = exec->socket >= 0 ? now + SECOND : NEVER;
}

/* A command must not get out of reach by stopping its supervisor. One that does so all the time loses it. */
static void revive(struct exec *exec) {
	kill(exec->supervisor, ++exec->stops > STOPS_FORGIVEN ? SIGKILL : SIGCONT);
}

void reap_supervisors(void) {
	int status;
	for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED | __WALL)) > 0;) {
		lose_spare(pid, !WIFSTOPPED(status));
		for (struct exec *exec = execs; exec; exec = exec->next) {
			if (exec->supervisor != pid)
				continue;
			if (WIFSTOPPED(status))
				revive(exec);
			else
				exec->supervisor = 0;
		}
	}
}

/* Its supervisor was killed and is reaped, so that what it left is now below us. */
bool is_orphaned(const struct exec *exec) {
	return exec->socket < 0 && !exec->supervisor && !exec->gone;
}

static bool is_supervisor(pid_t pid) {
	for (struct exec *exec = execs; exec; exec = exec->next)
		if (exec->supervisor == pid)
			return true;
	return is_spare(pid);
}

/*
 * Ends what killed supervisors left; living ones keep their own. (As process 1 of a container we also
 * get orphans of processes that others started there; a killed supervisor ends those too.)
 * Returns whether there is news for the client.
 */
bool hunt_strays(void) {
	bool orphans = false, news = false;
	for (struct exec *exec = execs; exec; exec = exec->next)
		orphans |= is_orphaned(exec);
	if (!orphans)
		return false;
	size_t left = kill_descendants(agent_pid, is_supervisor);
	struct ending lost = {.cause = CAUSE_SUPERVISOR_LOST, .code = -SIGKILL};
	lost.flags = left || !have_proc ? FLAG_SURVIVORS : 0;
	for (struct exec *exec = execs; exec; exec = exec->next) {
		if (!is_orphaned(exec) || (left && now_ns() < exec->give_up_at))
			continue;
		if (exec->state == RUNNING)
			begin_end(exec, &lost);
		exec->gone = news = true;
	}
	return news;
}
