// SPDX-License-Identifier: GPL-2.0-only
// The kernel types, helpers and kfuncs that the programs here use. Members are found by name when a program is loaded
// (CO-RE), so that one object fits kernels with different layouts. Neither vmlinux.h nor headers of libbpf are needed.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
typedef long long s64;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)

#define SEC(name) __attribute__((section(name), used))
#define KFUNC extern __attribute__((section(".ksyms")))
#define WEAK_KFUNC extern __attribute__((section(".ksyms"), weak))
#define GLOBAL __attribute__((noinline))
#define INLINE static inline __attribute__((always_inline))

// Attributes of maps in BTF.
#define MAP_ATTRIBUTE(name, value) int (*name)[value]
#define MAP_TYPE(name, of) typeof(of) *name
enum { BPF_MAP_TYPE_HASH = 1, BPF_MAP_TYPE_ARRAY = 2, BPF_MAP_TYPE_TASK_STORAGE = 29 };
enum { BPF_F_NO_PREALLOC = 1, BPF_LOCAL_STORAGE_GET_F_CREATE = 1 };

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct cpumask { unsigned long bits[1]; };
struct sched_ext_entity { u64 slice, dsq_vtime; u32 weight, flags; };
struct task_struct {
	s32 pid, tgid, nr_cpus_allowed;
	u32 flags;
	const struct cpumask *cpus_ptr;
	struct sched_ext_entity scx;
};
enum scx_exit_kind { SCX_EXIT_NONE };
struct scx_exit_info { enum scx_exit_kind kind; s64 exit_code; const char *reason; const char *msg; };
struct scx_init_task_args;
struct scx_exit_task_args;
#pragma clang attribute pop

struct bpf_timer { u64 opaque[2]; } __attribute__((aligned(8)));
struct bpf_iter_num { u64 opaque[1]; } __attribute__((aligned(8)));
struct bpf_iter_scx_dsq { u64 opaque[6]; } __attribute__((aligned(8)));

// linux/sched.h
#define PF_EXITING 0x00000004
#define PF_KTHREAD 0x00200000
// linux/sched/ext.h
#define SCX_DSQ_LOCAL 0x8000000000000002ULL
#define SCX_TASK_QUEUED 1
// kernel/sched/ext_internal.h
#define SCX_ENQ_WAKEUP 1ULL
#define SCX_ENQ_PREEMPT (1ULL << 32)
#define SCX_KICK_IDLE 1ULL
#define SCX_KICK_PREEMPT 2ULL
#define SCX_OPS_ENQ_LAST 2ULL
#define SCX_OPS_SWITCH_PARTIAL 8ULL

// libbpf matches members by name; members that are not named here are zero.
struct sched_ext_ops {
	s32 (*select_cpu)(struct task_struct *, s32, u64);
	void (*enqueue)(struct task_struct *, u64);
	void (*dispatch)(s32, struct task_struct *);
	void (*runnable)(struct task_struct *, u64);
	void (*running)(struct task_struct *);
	void (*stopping)(struct task_struct *, bool);
	void (*quiescent)(struct task_struct *, u64);
	bool (*yield)(struct task_struct *, struct task_struct *);
	void (*cpu_online)(s32);
	void (*cpu_offline)(s32);
	s32 (*init_task)(struct task_struct *, struct scx_init_task_args *);
	void (*exit_task)(struct task_struct *, struct scx_exit_task_args *);
	s32 (*init)(void);
	void (*exit)(struct scx_exit_info *);
	u64 flags;
	u32 timeout_ms;
	char name[128];
};

// Helpers, by their numbers in linux/bpf.h.
static void *(*const bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static u64 (*const bpf_ktime_get_ns)(void) = (void *)5;
static u32 (*const bpf_get_smp_processor_id)(void) = (void *)8;
static long (*const bpf_probe_read_kernel_str)(void *to, u32 size, const void *from) = (void *)115;
static void *(*const bpf_task_storage_get)(void *map, struct task_struct *task, void *value, u64 flags) = (void *)156;
static long (*const bpf_timer_init)(struct bpf_timer *timer, void *map, u64 flags) = (void *)169;
static long (*const bpf_timer_set_callback)(struct bpf_timer *timer, void *function) = (void *)170;
static long (*const bpf_timer_start)(struct bpf_timer *timer, u64 ns, u64 flags) = (void *)171;

KFUNC int bpf_iter_num_new(struct bpf_iter_num *it, int start, int end);
KFUNC int *bpf_iter_num_next(struct bpf_iter_num *it);
KFUNC void bpf_iter_num_destroy(struct bpf_iter_num *it);
KFUNC int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, u64 id, u64 flags);
KFUNC struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it);
KFUNC void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it);
KFUNC bool bpf_cpumask_test_cpu(u32 cpu, const struct cpumask *mask);
KFUNC s32 scx_bpf_create_dsq(u64 id, s32 node);
KFUNC s32 scx_bpf_dsq_nr_queued(u64 id);
KFUNC void scx_bpf_dsq_insert(struct task_struct *p, u64 id, u64 slice, u64 flags);
KFUNC void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 id, u64 slice, u64 vtime, u64 flags);
KFUNC bool scx_bpf_dsq_move_to_local(u64 id);
// The suffix makes the verifier treat the argument as an iterator.
KFUNC bool scx_bpf_dsq_move(struct bpf_iter_scx_dsq *it__iter, struct task_struct *p, u64 id, u64 flags);
KFUNC void scx_bpf_kick_cpu(s32 cpu, u64 flags);
KFUNC s32 scx_bpf_select_cpu_dfl(struct task_struct *p, s32 previous, u64 flags, bool *is_idle);
KFUNC bool scx_bpf_test_and_clear_cpu_idle(s32 cpu);
KFUNC s32 scx_bpf_task_cpu(const struct task_struct *p);
KFUNC const struct cpumask *scx_bpf_get_online_cpumask(void);
KFUNC void scx_bpf_put_cpumask(const struct cpumask *mask);
WEAK_KFUNC bool scx_bpf_task_set_slice(struct task_struct *p, u64 slice);
WEAK_KFUNC bool scx_bpf_task_set_dsq_vtime(struct task_struct *p, u64 vtime);

#define FOR_EACH_NUMBER(i, from, to)                                                                                   \
	for (struct bpf_iter_num it __attribute__((aligned(8), cleanup(bpf_iter_num_destroy))),                        \
	     *next __attribute__((unused)) = (bpf_iter_num_new(&it, (from), (to)), (void *)0);                         \
	     ({                                                                                                        \
		     int *number = bpf_iter_num_next(&it);                                                             \
		     if (number)                                                                                       \
			     i = *number;                                                                              \
		     !!number;                                                                                         \
	     });)
#define FOR_EACH_QUEUED(p, dsq)                                                                                        \
	for (struct bpf_iter_scx_dsq queued __attribute__((aligned(8), cleanup(bpf_iter_scx_dsq_destroy))),            \
	     *next_queued __attribute__((unused)) = (bpf_iter_scx_dsq_new(&queued, (dsq), 0), (void *)0);              \
	     ((p) = bpf_iter_scx_dsq_next(&queued));)
