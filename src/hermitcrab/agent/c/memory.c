/*
 * Did the kernel kill something here for want of memory? The counter of our own cgroup tells. It is read at the
 * start and when something ended by KILL; an ordinary end costs nothing.
 */
#include "agent.h"

#include <limits.h>

static char *counter; /* the file that holds it; NULL where there is none */
static uint64_t seen;

/* Our path in the hierarchy that counts memory: of version 1 where there is one, else of version 2. */
static bool find_cgroup(char path[PATH_MAX], bool *legacy) {
	char line[PATH_MAX + 256], names[256], found[PATH_MAX];
	bool any = *legacy = false;
	FILE *file = fopen("/proc/self/cgroup", "re");
	while (file && !*legacy && fgets(line, sizeof line, file)) {
		names[0] = found[0] = 0;
		bool unified = sscanf(line, "0::%4095[^\n]", found) == 1;
		if (!unified && sscanf(line, "%*d:%255[^:]:%4095[^\n]", names, found) != 2)
			continue;
		*legacy = strcmp(names, "memory") == 0 || strstr(names, "memory,") || strstr(names, ",memory");
		if (!*legacy && !unified)
			continue;
		strcpy(path, found);
		any = true;
	}
	if (file)
		fclose(file);
	return any;
}

/* Where that path is to be seen: a mount shows the hierarchy from its `root` on. */
static bool find_mount(const char *path, bool legacy, char directory[PATH_MAX]) {
	char line[3 * PATH_MAX], root[PATH_MAX], point[PATH_MAX];
	bool found = false;
	FILE *file = fopen("/proc/self/mountinfo", "re");
	while (file && !found && fgets(line, sizeof line, file)) {
		const char *kind = strstr(line, legacy ? " - cgroup " : " - cgroup2 ");
		if (!kind || (legacy && !strstr(kind, ",memory")))
			continue;
		if (sscanf(line, "%*d %*d %*s %4095s %4095s", root, point) != 2)
			continue;
		size_t length = strcmp(root, "/") == 0 ? 0 : strlen(root);
		const char *below = path + length;
		found = strncmp(path, root, length) == 0 && (!*below || *below == '/') &&
		        snprintf(directory, PATH_MAX, "%s%s", point, strcmp(below, "/") == 0 ? "" : below) < PATH_MAX;
	}
	if (file)
		fclose(file);
	return found;
}

static uint64_t kills(void) {
	char line[256];
	unsigned long long count = 0;
	FILE *file = counter ? fopen(counter, "re") : NULL;
	while (file && fgets(line, sizeof line, file) && sscanf(line, "oom_kill %llu", &count) != 1)
		;
	if (file)
		fclose(file);
	return count;
}

/* The root of version 1 counts what happens to everybody; it is known by its release_agent. */
void begin_counting_kills(void) {
	char path[PATH_MAX], directory[PATH_MAX], file[PATH_MAX + 32];
	bool legacy;
	if (!find_cgroup(path, &legacy) || !find_mount(path, legacy, directory))
		return;
	snprintf(file, sizeof file, "%s/release_agent", directory);
	if (access(file, F_OK) == 0)
		return;
	snprintf(file, sizeof file, "%s/%s", directory, legacy ? "memory.oom_control" : "memory.events");
	counter = must(strdup(file));
	seen = kills();
}

/* Has it happened since we last looked? */
bool memory_ran_out(void) {
	uint64_t before = seen;
	seen = kills();
	return seen > before;
}
