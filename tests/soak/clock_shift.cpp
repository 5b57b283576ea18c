// Shifts the wall clock of the processes that preload this library by the seconds in the first 8 bytes of the file that
// CLOCK_SHIFT_FILE names, which may change at any time. The monotonic clock stays, as when an administrator sets the
// clock. libfaketime 0.9.10 cannot do this for Python: with it, time.sleep fails with EINVAL.
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

namespace {
const volatile int64_t* shift = nullptr;

__attribute__((constructor)) void map_the_file() {
    const char* path = getenv("CLOCK_SHIFT_FILE");
    int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void* mapped = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) shift = static_cast<const volatile int64_t*>(mapped);
    close(file);
}
}  // namespace

extern "C" int clock_gettime(clockid_t clock, struct timespec* now) noexcept {
    int failed = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
    if (!failed && shift != nullptr && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift;
    return failed;
}

extern "C" int gettimeofday(struct timeval* now, void*) noexcept {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

extern "C" time_t time(time_t* result) noexcept {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result != nullptr) *result = exact.tv_sec;
    return exact.tv_sec;
}
