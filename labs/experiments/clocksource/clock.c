/* Prints the mean time of clock_gettime(CLOCK_MONOTONIC) by the clock itself. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double seconds(void) {
	struct timespec now;
	if (clock_gettime(CLOCK_MONOTONIC, &now) != 0)
		exit(1);
	return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int count, char **arguments) {
	long calls = count > 1 ? atol(arguments[1]) : 20000;
	double start = seconds();
	for (long i = 0; i < calls; i++)
		seconds();
	printf("call %.3f ns\n", (seconds() - start) / calls * 1e9);
	return 0;
}
