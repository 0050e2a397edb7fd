/* A library to preload: the real-time clock as a process reads it is off by as many seconds as a file says, which is
   looked at once a second. The monotonic clock is true, as it is when somebody sets a machine's clock. Who waits until a
   time of that clock waits by it, too: the kernel, which knows of nothing, gets its own time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
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

/* The same moment by the kernel's clock. A time by the monotonic one, which counts from the machine's start, stays. */
static struct timespec by_kernel(const struct timespec *until) {
  struct timespec found = *until;
  if (found.tv_sec > 1000000000) found.tv_sec -= ahead();
  return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  /* Not the oldest of that name, whose conditions are laid out otherwise. */
  if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec time = by_kernel(until);
  return next(condition, mutex, &time);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  static int (*next)(pthread_mutex_t *, const struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec time = by_kernel(until);
  return next(mutex, &time);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static int (*next)(sem_t *, const struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec time = by_kernel(until);
  return next(semaphore, &time);
}
