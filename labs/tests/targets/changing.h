/* States of a process that changes itself: its threads end and others start, its children execute other programs, as it
 * does itself. Part of `states.c`. */

/* Threads start and end, and children are made by fork, vfork and exec, all the time. */
static void *nothing(void *argument)
{
	return argument;
}

static void storm(void)
{
	ready();
	while (!finish) {
		pthread_t thread;
		check(pthread_create(&thread, NULL, nothing, NULL) == 0, "pthread_create");
		pid_t child = fork();
		if (!child)
			_exit(7);
		pid_t other = vfork();
		if (!other) {
			execl("/bin/true", "true", NULL);
			_exit(8);
		}
		int status;
		check(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7, "a forked child");
		check(waitpid(other, &status, 0) == other && status == 0, "an executed child");
		pthread_join(thread, NULL);
	}
}

/* Executes itself repeatedly, until its standard input closes. */
static char **own;
static void execs(void)
{
	const char *again = getenv("AGAIN");
	char text[20];
	int times = again ? atoi(again) : 0;
	if (!times)
		ready();
	snprintf(text, sizeof text, "%d", times + 1);
	setenv("AGAIN", text, 1);
	struct pollfd poll = {.fd = 0, .events = POLLIN};
	if (look(&poll, 0) > 0) {
		printf("OK\n");
		fflush(stdout);
		_exit(0);
	}
	/* Leaves more and more time for a visit, which takes longer on a slow machine. */
	usleep(500 + 5 * times);
	execv("/proc/self/exe", own);
	fail("exec");
}

/* A child of vfork, in the memory of this process, executes another program when a byte arrives on standard input; then
 * the next child does. The program is this one again, or PROGRAM, in the state `spin`. Without randomization, so that
 * the stacks of both are at the same addresses. */
static void newborn(void)
{
	const char *named = getenv("PROGRAM");
	if (!(personality(0xffffffff) & ADDR_NO_RANDOMIZE)) {
		check(personality(ADDR_NO_RANDOMIZE) != -1, "personality");
		execv("/proc/self/exe", own);
		fail("exec");
	}
	char *const arguments[] = {own[0], "spin", NULL};
	ready();
	while (!finish) {
		pid_t child = vfork();
		if (!child) {
			char byte;
			syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL);
			if (syscall(SYS_read, 0, &byte, 1) == 1)
				execv(named ? named : "/proc/self/exe", arguments);
			_exit(0);
		}
		int status;
		check(waitpid(child, &status, 0) == child && status == 0, "a child that executed another program");
	}
}

/* Threads that each start the next one and end, until standard input closes. */
enum { CHAINS = 8 };
static atomic_int chains;
static int main_has_ended;
static void *link_of_chain(void *argument);

static void begin_thread(void)
{
	pthread_t thread;
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	check(pthread_create(&thread, &attributes, link_of_chain, NULL) == 0, "pthread_create");
	pthread_attr_destroy(&attributes);
}

static void *link_of_chain(void *argument)
{
	struct pollfd poll = {.fd = 0, .events = POLLIN};
	usleep(1000);
	if (look(&poll, 0) == 0)
		begin_thread();
	else if (atomic_fetch_sub(&chains, 1) == 1 && main_has_ended) {
		printf("OK\n");
		fflush(stdout);
		_exit(0);
	}
	return argument;
}

static void begin_chains(void)
{
	atomic_store(&chains, CHAINS);
	for (int i = 0; i < CHAINS; i++)
		begin_thread();
}

/* Such threads, while the main one waits for a vfork child and cannot be stopped. */
static void churn(void)
{
	begin_chains();
	ready();
	pid_t child = vfork();
	if (!child) {
		struct pollfd poll = {.fd = 0, .events = POLLIN};
		syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL);
		while (look(&poll, 1) != 1)
			;
		_exit(0);
	}
	check(waitpid(child, NULL, 0) == child, "waitpid");
	while (atomic_load(&chains))
		usleep(1000);
}

/* Such threads, without a main thread. */
static void leaderless(void)
{
	main_has_ended = 1;
	begin_chains();
	ready();
	syscall(SYS_exit, 0);
}
