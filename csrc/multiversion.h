// One function compiled for several instruction sets, chosen when the module is loaded.
#pragma once

// Wheels are built for baseline x86-64. target_clones needs ifunc support, which glibc has and musl has not.
// FMA is left out of every set: contraction is off anyway, and results must match bit for bit.
#if defined(__x86_64__) && defined(__linux__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#include <features.h>
#if defined(__GLIBC__)
#define TDP_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef TDP_MULTIVERSION
#define TDP_MULTIVERSION
#endif
