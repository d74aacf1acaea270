/* Vectors of 4 values, which every 64-bit processor has. */
#define LANES 4
#define NAME "vectors of 4"
#define LOOPS loops_any
#include "loops.h"
