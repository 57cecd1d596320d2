/* Timers and sleeps on the monotonic clock, left alone. libfaketime moves every absolute timerfd, and every sleep until an
   absolute time, by as much as the time of day, whatever its clock is (its issue 378), so this stands in front of it. */

#include <errno.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

int timerfd_settime(int fd, int flags, const struct itimerspec *value, struct itimerspec *old) {
    return (int)syscall(SYS_timerfd_settime, fd, flags, value, old);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *value, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, value, left) ? errno : 0;
}
