/* Vectors of 16 values. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v4")
#define LANES 16
#define PROCESSOR "x86-64-v4"
#define NAME "AVX-512"
#define LOOPS loops_avx512
#include "loops.h"
#endif
