/* Vectors of 8 values. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define PROCESSOR "x86-64-v3"
#define NAME "AVX2"
#define LOOPS loops_avx2
#include "loops.h"
#endif
