// glibc has this since 2.32, and the C++ library of a newer compiler asks for it. Its value here, that there may be several
// threads, is always right; modules that have it themselves run with the older glibc that torch runs with.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
