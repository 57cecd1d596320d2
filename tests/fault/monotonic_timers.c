/* Timers on the monotonic clock, left alone. libfaketime moves every absolute timerfd by as much as the time of day, whatever
   its clock is (its issue 378), so this stands in front of it. */

#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

int timerfd_settime(int fd, int flags, const struct itimerspec *value, struct itimerspec *old) {
    return (int)syscall(SYS_timerfd_settime, fd, flags, value, old);
}
