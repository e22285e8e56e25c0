/*
 * Spare supervisors: their exec is over, nothing of it is left, and they wait for the next one. Most commands then
 * cost neither a fork of the agent nor the exit of a supervisor. Whoever is unusual is not kept: a new one is forked.
 */
#include "agent.h"

#include <sys/socket.h>
#include <sys/uio.h>

enum { SPARES = 2, LONGEST_JOB = 64 << 10, JOB_FDS = 32 };
#define SPARE_TIME (2 * SECOND) /* with nothing to do */

static struct spare {
	pid_t pid; /* 0 for a free place */
	int socket;
	bool ready; /* it said so */
	int64_t until;
} spares[SPARES], *const end_of_spares = spares + SPARES;

/* A START as it came: in the agent the one it is about, in a supervisor the one that it was given. */
static uint8_t job[LONGEST_JOB];

union job_fds {
	struct cmsghdr head;
	char room[CMSG_SPACE(JOB_FDS * sizeof(int))];
};

static struct spare *find_spare(pid_t pid) {
	for (struct spare *spare = spares; spare < end_of_spares; spare++)
		if (spare->pid == pid)
			return spare;
	return NULL;
}

bool is_spare(pid_t pid) { return find_spare(pid); }

static void forget_spare(struct spare *spare) {
	close_fd(&spare->socket);
	spare->pid = 0;
}

/* KILL, as somebody may have stopped it. There is nothing below it. */
static void let_go(struct spare *spare) {
	kill(spare->pid, SIGKILL);
	forget_spare(spare);
}

/* Somebody stopped or ended it; a process that is reaped must not be signalled. */
void lose_spare(pid_t pid, bool reaped) {
	struct spare *spare = find_spare(pid);
	if (!spare)
		return;
	if (reaped)
		forget_spare(spare);
	else
		let_go(spare);
}

/* Takes the supervisor of an exec that is over. Without a place for it, it ends when its socket is closed. */
void keep_spare(struct exec *exec) {
	struct spare *place = find_spare(0);
	if (!place || !exec->supervisor)
		return;
	*place = (struct spare){.pid = exec->supervisor, .socket = exec->socket, .until = now_ns() + SPARE_TIME};
	exec->supervisor = 0;
	exec->socket = -1;
}

/* Lets those go that waited for too long; all of them when `now` is NEVER. Returns when the next one will have. */
int64_t expire_spares(int64_t now) {
	int64_t next = NEVER;
	for (struct spare *spare = spares; spare < end_of_spares; spare++) {
		if (spare->pid && now >= spare->until)
			let_go(spare);
		if (spare->pid)
			next = earlier(next, spare->until);
	}
	return next;
}

static bool have_spares(void) {
	for (struct spare *spare = spares; spare < end_of_spares; spare++)
		if (spare->pid)
			return true;
	return false;
}

/* Before it is parsed, which changes it. Returns how long the copy is: 0 when it is of no use. */
size_t copy_job(const uint8_t *payload, size_t length) {
	if (length > sizeof job || !have_spares())
		return 0;
	memcpy(job, payload, length);
	return length;
}

static bool is_sent(const struct planned_fd *plan) { return plan->kind != FD_NULL && plan->kind != FD_SAME; }

/* Returns how many there are, 0 when they are too many. (There is no START without any: see give_to_spare.) */
static size_t collect_fds(const struct start *start, int fds[JOB_FDS]) {
	size_t count = 0;
	for (const struct planned_fd *plan = start->fds; plan < start->fds + start->fd_count; plan++) {
		if (!is_sent(plan))
			continue;
		if (count == JOB_FDS)
			return 0;
		fds[count++] = plan->fd;
	}
	return count;
}

static bool send_job(int socket, size_t length, const int *fds, size_t count) {
	struct order order = {.what = ORDER_START};
	struct iovec parts[] = {{&order, sizeof order}, {job, length}};
	union job_fds sent = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &sent};
	memcpy(CMSG_DATA(&sent.head), fds, count * sizeof *fds);
	sent.head.cmsg_len = CMSG_LEN(count * sizeof *fds);
	message.msg_controllen = CMSG_SPACE(count * sizeof *fds);
	return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

/* It does not hurry: the client waits for the end of its exec, not for this. */
static bool is_ready(struct spare *spare) {
	char byte;
	if (spare->pid && !spare->ready)
		spare->ready = recv(spare->socket, &byte, 1, MSG_DONTWAIT) == 1;
	return spare->pid && spare->ready;
}

/* Returns whether one took it. What is too large, or has no descriptors, is left to a new supervisor. */
bool give_to_spare(struct exec *exec, const struct start *start) {
	int fds[JOB_FDS];
	size_t count = start->copied ? collect_fds(start, fds) : 0;
	for (struct spare *spare = spares; count && spare < end_of_spares; spare++) {
		if (!is_ready(spare))
			continue;
		if (!send_job(spare->socket, start->copied, fds, count)) {
			let_go(spare);
			continue;
		}
		exec->supervisor = spare->pid;
		exec->socket = spare->socket;
		spare->pid = 0;
		return true;
	}
	return false;
}

/* As open_fd does in the agent. One that did not come is -1, and the command is not started. */
static void assign_fds(struct start *start, const union job_fds *sent, size_t count) {
	size_t used = 0;
	for (struct planned_fd *plan = start->fds; plan < start->fds + start->fd_count; plan++) {
		plan->fd = plan->kind == FD_NULL ? dev_null : plan->kind == FD_SAME ? plan->same->fd : -1;
		if (is_sent(plan) && used < count)
			memcpy(&plan->fd, CMSG_DATA(&sent->head) + used++ * sizeof(int), sizeof(int));
	}
}

/* In a supervisor: asks for the next START and waits. Returns whether one came; else the agent needs us no more. */
bool take_job(int socket, struct start *start) {
	struct order order;
	struct iovec parts[] = {{&order, sizeof order}, {job, sizeof job}};
	union job_fds sent;
	struct msghdr message;
	ssize_t n = send(socket, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
	do {
		message = (struct msghdr){
			.msg_iov = parts, .msg_iovlen = 2, .msg_control = &sent, .msg_controllen = sizeof sent};
		n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
		/* Any other order was for the exec before, and too late. */
	} while (n < 0 ? errno == EINTR : n >= (ssize_t)sizeof order && order.what != ORDER_START);
	free_start(start);
	if (n < (ssize_t)sizeof order || read_start(start, job, (size_t)n - sizeof order))
		return false;
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	assign_fds(start, &sent, head ? (head->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0);
	return true;
}
