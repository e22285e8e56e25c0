/* The command line. */
#include "agent.h"

#include <limits.h>

enum { LONGEST_LEASE = 1000000000 };

/* Returns the seconds, 0 when that is no sensible number of them. */
static long lease_of(const char *text) {
	char *end;
	errno = 0;
	long seconds = strtol(text, &end, 10);
	bool number = *text >= '0' && *text <= '9' && !*end && !errno;
	return number && seconds <= LONGEST_LEASE ? seconds : 0;
}

/* Returns whether it is an option that takes that value. */
static bool take_option(struct options *options, const char *name, const char *value) {
	if (strcmp(name, "--lease") == 0)
		return (options->lease = lease_of(value));
	const char **path = strcmp(name, "--serve") == 0     ? &options->serve
	                    : strcmp(name, "--connect") == 0 ? &options->connect
	                    : strcmp(name, "--join") == 0    ? &options->join
	                                                     : NULL;
	if (path)
		*path = value;
	return path && *value;
}

/* Returns whether the command line makes sense. */
bool read_options(char **argv, struct options *options) {
	for (char **at = argv + !!*argv; *at; at++)
		if (strcmp(*at, "--unlink") == 0)
			options->unlink = true;
		else if (strcmp(*at, "--text") == 0)
			options->text = true;
		else if (!at[1] || !take_option(options, at[0], at[1]))
			return false;
		else
			at++;
	bool sent = options->unlink || options->text;
	int paths = !!options->serve + !!options->connect + !!options->join;
	return paths <= 1 && !(options->connect && (options->lease || sent)) && !(options->serve && sent);
}

/* For a program that came through the pipe: nothing of it stays. */
void unlink_self(const char *name) {
	char path[PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
	if (length > 0) {
		path[length] = 0;
		name = path;
	}
	if (strchr(name, '/'))
		unlink(name);
}
