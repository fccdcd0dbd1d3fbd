/* Headers of the standard library, included before a target's instructions are switched on: its inline functions are
 * shared by all targets. */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
