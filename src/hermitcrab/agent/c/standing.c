/*
 * What a process passes on to its children and others may have changed: a command can do so to its supervisor, by
 * `prlimit --pid $PPID` or `renice`. Such a supervisor gets no next exec.
 */
#include "agent.h"

#include <sched.h>
#include <sys/syscall.h>

enum { IOPRIO_WHO_PROCESS = 1 };

struct standing {
	struct rlimit limits[RLIM_NLIMITS];
	cpu_set_t cpus;
	long policy, nice, io_priority;
	char oom_score[16], cgroups[4096];
};

static struct standing usual;

static void read_text(const char *path, char *text, size_t size) {
	int fd = have_proc ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (fd >= 0 && read(fd, text, size) < 0)
		*text = 0;
	close_fd(&fd);
}

static void look(struct standing *standing) {
	memset(standing, 0, sizeof *standing);
	for (int i = 0; i < RLIM_NLIMITS; i++)
		getrlimit(i, &standing->limits[i]);
	sched_getaffinity(0, sizeof standing->cpus, &standing->cpus);
	standing->policy = syscall(SYS_sched_getscheduler, 0); /* musl has none */
	standing->nice = getpriority(PRIO_PROCESS, 0);
	standing->io_priority = syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0);
	read_text("/proc/self/oom_score_adj", standing->oom_score, sizeof standing->oom_score);
	read_text("/proc/self/cgroup", standing->cgroups, sizeof standing->cgroups);
}

void remember_standing(void) { look(&usual); }

bool has_usual_standing(void) {
	struct standing now;
	look(&now);
	return memcmp(&now, &usual, sizeof now) == 0;
}
