/* A library to preload: the real-time clock as a process reads it is off by as many seconds as a file says, which is
   looked at once a second. The monotonic clock is true, as it is when somebody sets a machine's clock. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
  static _Atomic long seconds, looked = -1;
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  if (looked != now.tv_sec) {
    looked = now.tv_sec;
    const char *path = getenv("CLOCK_OFFSET_FILE");
    char text[32] = "";
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
      if (read(file, text, sizeof text - 1) > 0) seconds = atol(text);
      close(file);
    }
  }
  return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *seconds) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  if (seconds) *seconds = now.tv_sec;
  return now.tv_sec;
}
