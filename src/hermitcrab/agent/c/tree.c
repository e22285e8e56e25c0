/* Finding the descendants of a process through /proc, and ending them. */
#include "agent.h"

#include <dirent.h>

struct process {
	pid_t pid, parent;
	char state;
	bool marked;
};

static struct process *processes; /* sorted by pid */
static size_t process_count, process_room;

/* The name in stat is chosen by the process and may hold spaces and parentheses: skip to the last ')'. */
static bool read_stat(pid_t pid, struct process *process) {
	char path[64], text[1024];
	snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = 0;
	char *after_name = strrchr(text, ')');
	*process = (struct process){.pid = pid};
	return after_name && sscanf(after_name + 1, " %c %d", &process->state, &process->parent) == 2;
}

bool is_stopped(pid_t pid) {
	struct process process;
	return have_proc && read_stat(pid, &process) && (process.state == 'T' || process.state == 't');
}

static int by_pid(const void *a, const void *b) {
	pid_t x = ((const struct process *)a)->pid, y = ((const struct process *)b)->pid;
	return (x > y) - (x < y);
}

static void scan_processes(void) {
	process_count = 0;
	DIR *dir = have_proc ? opendir("/proc") : NULL;
	if (!dir)
		return;
	for (struct dirent *entry; (entry = readdir(dir));) {
		pid_t pid = atoi(entry->d_name);
		if (pid <= 0)
			continue;
		if (process_count == process_room) {
			process_room = process_room ? 2 * process_room : 256;
			processes = must(realloc(processes, process_room * sizeof *processes));
		}
		if (read_stat(pid, &processes[process_count]))
			process_count++;
	}
	closedir(dir);
	if (process_count)
		qsort(processes, process_count, sizeof *processes, by_pid);
}

static bool is_marked(pid_t pid) {
	struct process key = {.pid = pid};
	struct process *found = bsearch(&key, processes, process_count, sizeof key, by_pid);
	return found && found->marked;
}

/*
 * Scans and marks every living descendant of root, except below the children that `spared` names.
 * Returns how many. Parents mostly have smaller pids, so this takes two or three passes.
 */
static size_t mark_descendants(pid_t root, bool (*spared)(pid_t)) {
	scan_processes();
	for (bool changed = true; changed;) {
		changed = false;
		for (size_t i = 0; i < process_count; i++) {
			struct process *p = &processes[i];
			if (p->marked || p->pid == root)
				continue;
			p->marked = p->parent == root ? !spared || !spared(p->pid) : is_marked(p->parent);
			changed |= p->marked;
		}
	}
	size_t found = 0;
	for (size_t i = 0; i < process_count; i++) {
		if (processes[i].state == 'Z' || processes[i].state == 'X')
			processes[i].marked = false;
		found += processes[i].marked;
	}
	return found;
}

static void signal_marked(int number) {
	for (size_t i = 0; i < process_count; i++)
		if (processes[i].marked)
			kill(processes[i].pid, number);
}

void signal_descendants(pid_t root, int number) {
	mark_descendants(root, NULL);
	signal_marked(number);
}

/*
 * STOP first and look again, so that nothing forks away between the look and the KILL.
 * Returns how many were there: 0 says that it is done.
 */
size_t kill_descendants(pid_t root, bool (*spared)(pid_t)) {
	size_t found = mark_descendants(root, spared);
	size_t before = 0;
	for (int pass = 0; found != before && pass < 10; pass++) {
		signal_marked(SIGSTOP);
		before = found;
		found = mark_descendants(root, spared);
	}
	signal_marked(SIGKILL);
	return found;
}
