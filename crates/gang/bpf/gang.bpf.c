// SPDX-License-Identifier: GPL-2.0-only
// Schedules virtual machines: a sched_ext program (Linux 6.13 and later) with three policies.
//
// spread: siblings, which are vCPUs of one VM, wait on different CPUs.
// throttled-yield: spread; a vCPU that spins yields to the sibling that KVM picked at most once an interval, else to
//   another VM.
// gang: time is divided into slots. In a slot each CPU belongs to one VM, or to ordinary tasks, and a VM gets as many
//   CPUs as it has runnable vCPUs. VMs with the lowest virtual time go first; smaller ones fill the gaps. A VM gets CPUs
//   of one NUMA node if they suffice: of its home, which user space names, else of any other.
//
// Threads are of three kinds. vCPUs: user space lists them in `vcpus`. I/O threads: other threads of a process in
// `machines`; they run at once, on their VM's account. Ordinary tasks: all else, if the program schedules the whole host.
// Those that use little CPU time run at once; the rest share slots of their own, in settings.ordinary_percent of the time.
//
// Loop-carried state of nested loops is in `rotation`: in registers, each round would be a new state of the verifier.
// Arrays are indexed through masks, which the verifier can bound. Functions marked GLOBAL are verified separately.
#include "kernel.h"

#define MAX_CPUS 512
#define MAX_GANGS 128
// The owner of a CPU that is neither free (0) nor a gang's.
#define ORDINARY (MAX_GANGS - 1)
#define MAX_NODES 64
// The node of a CPU or a gang that has none.
#define NO_NODE 255
#define MAX_SCANNED_TASKS 64
#define MAX_CREDIT_NS 2000000ULL
#define CREDIT_DIVISOR 10
#define MAX_LIGHT_NS 4000000ULL
#define LIGHT_DIVISOR 5
#define WIDE_SLICE_NS 1000000ULL
#define MIN_SLOT_NS 1000000ULL
#define EARLY_NS 100000ULL
#define MIN_DELAY_NS 1000ULL
// Guests decide when their vCPUs sleep and wake; they cannot cause rotations more often than this.
#define MIN_ROTATION_INTERVAL_NS 200000ULL

#define DSQ_LIGHT 1ULL
#define DSQ_ORDINARY 2ULL
#define DSQ_CPU(cpu) (0x10000ULL + (u32)(cpu))
#define DSQ_GANG(gang) (0x20000ULL + (u32)(gang))

enum policy { SPREAD, THROTTLED_YIELD, GANG };
enum kind { ORDINARY_TASK, IO_THREAD, VCPU };

// Written by user space before the program is loaded. The layout is repeated in program.rs.
struct settings {
	u32 policy, cpus, gangs, ordinary_percent, fill_gaps, stall;
	u64 slot_ns, slice_ns, yield_interval_ns;
	u32 weights[MAX_GANGS];
	u8 homes[MAX_GANGS], cpu_nodes[MAX_CPUS];
};
const volatile struct settings settings = {};

// Written by user space at any time: a new generation makes the program look up all threads again.
struct control { u32 generation; };
struct control control SEC(".data.control") = { 1 };

// Read by user space. The layout is repeated in program.rs.
struct gang_report { u64 cpu_ns, slots, yields, directed_yields; s32 runnable, threads; };
struct report {
	s32 exit_kind;
	u32 has_exited;
	s64 exit_code;
	u64 rotations, ordinary_slots, kicks;
	char reason[64], message[192];
	struct gang_report gangs[MAX_GANGS];
};
struct report report SEC(".data.report") = { 0 };

// seated: the runnable threads with a seat.
struct gang { s32 runnable, threads, granted, is_chosen, seated; u64 vtime, last_yield; };
struct gang gangs[MAX_GANGS];
// Runnable threads of a gang that may run on some CPUs only, each counted at one of these.
s32 seats[MAX_GANGS][MAX_CPUS];
// Runnable threads of a gang on a CPU (policies spread and throttled-yield).
s32 siblings[MAX_GANGS][MAX_CPUS];

struct cpu {
	u32 owner, next_owner, last_owner, running_gang, running_kind;
	u32 is_online, runnable, wants_gang, avoids_gang;
	s32 wants_pid;
	s64 light_ns;
	u64 since, light_at;
};
struct cpu cpus[MAX_CPUS];

struct rotation { u32 free, best, need, filler, is_wide, is_early, preempts, sharing; s32 seated; u64 best_vtime, has_chosen; };
struct rotation rotation;
// While owners are chosen. free: CPUs without an owner. granted: CPUs that the gang has now. recent: free CPUs that it had
// last.
struct node { u32 free, granted, recent; };
struct node nodes[MAX_NODES];
u64 slot_start, slot_end, last_rotation, vtime_now, ordinary_vtime;
s64 ordinary_credit;
// Whether threads may wait in the queue of a CPU that is offline (policies spread and throttled-yield).
u32 has_stranded;
// Whether a CPU was not kicked because the one that had to do it was offline.
u32 has_missed_kick;
// The maps, and with them all these variables, outlast the scheduler: user space may attach it again.
u32 is_attached;

struct thread {
	u32 gang, kind, generation, is_runnable, is_light;
	s32 cpu, counted_cpu, seat;
	u64 started, last_spin, credited_at;
	s64 credit;
};
struct {
	MAP_ATTRIBUTE(type, BPF_MAP_TYPE_TASK_STORAGE);
	MAP_ATTRIBUTE(map_flags, BPF_F_NO_PREALLOC);
	MAP_TYPE(key, int);
	MAP_TYPE(value, struct thread);
} threads SEC(".maps");
// Thread number to gang.
struct {
	MAP_ATTRIBUTE(type, BPF_MAP_TYPE_HASH);
	MAP_ATTRIBUTE(max_entries, 8192);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u32);
} vcpus SEC(".maps");
// Process number to gang.
struct {
	MAP_ATTRIBUTE(type, BPF_MAP_TYPE_HASH);
	MAP_ATTRIBUTE(max_entries, 1024);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u32);
} machines SEC(".maps");
struct slot_timer { struct bpf_timer timer; };
struct {
	MAP_ATTRIBUTE(type, BPF_MAP_TYPE_ARRAY);
	MAP_ATTRIBUTE(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct slot_timer);
} timers SEC(".maps");

INLINE bool is_before(u64 a, u64 b) { return (s64)(a - b) < 0; }
INLINE struct cpu *cpu_at(s32 cpu) { return &cpus[cpu & (MAX_CPUS - 1)]; }
INLINE struct gang *gang_at(u32 gang) { return &gangs[gang & (MAX_GANGS - 1)]; }
INLINE s32 *seats_at(u32 gang, s32 cpu) { return &seats[gang & (MAX_GANGS - 1)][cpu & (MAX_CPUS - 1)]; }
INLINE s32 *siblings_at(u32 gang, s32 cpu) { return &siblings[gang & (MAX_GANGS - 1)][cpu & (MAX_CPUS - 1)]; }
INLINE struct gang_report *report_at(u32 gang) { return &report.gangs[gang & (MAX_GANGS - 1)]; }
// CPUs without a node are counted at the last place, which user space gives to no node.
INLINE struct node *node_at(u32 node) { return &nodes[node & (MAX_NODES - 1)]; }
INLINE u32 node_of(s32 cpu) { return settings.cpu_nodes[cpu & (MAX_CPUS - 1)]; }
INLINE u32 home_of(u32 gang) { return settings.homes[gang & (MAX_GANGS - 1)]; }
INLINE struct thread *thread_of(struct task_struct *p) { return bpf_task_storage_get(&threads, p, NULL, 0); }
INLINE bool is_gang(u32 owner) { return owner && owner != ORDINARY; }

INLINE void set_slice(struct task_struct *p, u64 slice)
{
	if (&scx_bpf_task_set_slice)
		scx_bpf_task_set_slice(p, slice);
	else
		p->scx.slice = slice;
}

// Makes a CPU schedule anew. The kernel does it in interrupt work of the CPU on which this runs. A CPU that goes offline
// may have stopped such work: it would be pending for ever, and the kernel waits for it when the scheduler is removed.
static void kick(s32 cpu, u64 flags)
{
	if (cpu_at(bpf_get_smp_processor_id())->is_online)
		scx_bpf_kick_cpu(cpu, flags);
	else
		has_missed_kick = 1;
}

// Kicks idle CPUs, in place of kicks by a CPU that was offline. The end of its shutdown wakes a thread, which gets here.
GLOBAL u32 make_up_for_kicks(void)
{
	s32 cpu;
	if (!has_missed_kick || !cpu_at(bpf_get_smp_processor_id())->is_online)
		return 0;
	has_missed_kick = 0;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus)
		if (cpu_at(cpu)->is_online)
			scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
	return 0;
}

// ---- membership ----

static void count_runnable(struct thread *t, s32 change)
{
	if (t->kind != VCPU)
		return;
	__sync_fetch_and_add(&gang_at(t->gang)->runnable, change);
	if (t->seat >= 0) {
		__sync_fetch_and_add(seats_at(t->gang, t->seat), change);
		__sync_fetch_and_add(&gang_at(t->gang)->seated, change);
	}
}

// Looks up what the thread is, if user space has changed the lists since.
static void refresh(struct task_struct *p, struct thread *t)
{
	u32 generation = control.generation, key = p->pid, kind = ORDINARY_TASK, gang = 0, *found;
	if (t->generation == generation)
		return;
	t->generation = generation;
	found = bpf_map_lookup_elem(&vcpus, &key);
	if (found) {
		kind = VCPU;
		gang = *found;
	} else {
		key = p->tgid;
		found = bpf_map_lookup_elem(&machines, &key);
		if (found && !(p->flags & PF_KTHREAD)) {
			kind = IO_THREAD;
			gang = *found;
		}
	}
	if (kind == t->kind && gang == t->gang)
		return;
	if (t->is_runnable)
		count_runnable(t, -1);
	if (t->kind == VCPU)
		__sync_fetch_and_add(&gang_at(t->gang)->threads, -1);
	t->kind = kind;
	t->gang = gang & (MAX_GANGS - 1);
	if (kind == VCPU && !__sync_fetch_and_add(&gang_at(gang)->threads, 1))
		gang_at(gang)->vtime = vtime_now;
	if (t->is_runnable)
		count_runnable(t, 1);
}

// The CPU with the fewest seats of the gang among those on which the thread may run.
static s32 find_seat(struct task_struct *p, u32 gang)
{
	s32 cpu, best = -1, fewest = 1 << 30;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		s32 taken = *seats_at(gang, cpu);
		if (cpu_at(cpu)->is_online && taken < fewest && bpf_cpumask_test_cpu(cpu, p->cpus_ptr)) {
			fewest = taken;
			best = cpu;
		}
	}
	return best;
}

// ---- accounts ----

// Charges what runs on the CPU up to now. Also called while it runs on.
static void charge(s32 number, u64 now, u64 next)
{
	struct cpu *cpu = cpu_at(number);
	struct gang *gang = gang_at(cpu->running_gang);
	u64 old = __sync_lock_test_and_set(&cpu->since, next);
	u64 weight = settings.weights[cpu->running_gang & (MAX_GANGS - 1)], width = gang->threads > 0 ? gang->threads : 1;
	if (!old || !is_before(old, now) || !cpu->running_gang)
		return;
	__sync_fetch_and_add(&report_at(cpu->running_gang)->cpu_ns, now - old);
	__sync_fetch_and_add(&gang->vtime, (now - old) * 100 / ((weight ?: 100) * width));
}

// Whether the thread may run before gangs: it has used little CPU time, or is an I/O thread whose VM is not far ahead.
static bool is_light(struct thread *t, u64 now)
{
	s64 credit = t->credit + (s64)((now - t->credited_at) / CREDIT_DIVISOR);
	if (!t->credited_at || credit > (s64)MAX_CREDIT_NS)
		credit = MAX_CREDIT_NS;
	if (credit < -(s64)MAX_CREDIT_NS)
		credit = -(s64)MAX_CREDIT_NS;
	t->credit = credit;
	t->credited_at = now;
	if (t->kind == IO_THREAD && settings.policy == GANG &&
	    !is_before(vtime_now + 8 * settings.slot_ns, gang_at(t->gang)->vtime))
		return true;
	return credit > 0;
}

// Whether light tasks go before what the CPU is for. They have a part of the time; what is left of it is in light_ns.
INLINE bool takes_light(struct cpu *cpu, u64 now)
{
	if (settings.policy == GANG)
		return !is_gang(cpu->owner) || cpu->light_ns > 0;
	return cpu->light_ns + (s64)((now - cpu->light_at) / LIGHT_DIVISOR) > 0;
}

// Gives light tasks their part of the time since, up to a limit, and takes what they used.
INLINE void account_light(struct cpu *cpu, u64 elapsed, u64 used)
{
	s64 left = cpu->light_ns + (s64)(elapsed / LIGHT_DIVISOR);
	if (left > (s64)MAX_LIGHT_NS)
		left = MAX_LIGHT_NS;
	left -= used;
	cpu->light_ns = left < -(s64)MAX_LIGHT_NS ? -(s64)MAX_LIGHT_NS : left;
}

// ---- spread ----

static void move_count(struct thread *t, s32 cpu)
{
	if (t->counted_cpu == cpu)
		return;
	if (t->counted_cpu >= 0) {
		__sync_fetch_and_add(siblings_at(t->gang, t->counted_cpu), -1);
		__sync_fetch_and_add(&cpu_at(t->counted_cpu)->runnable, -1);
	}
	if (cpu >= 0) {
		__sync_fetch_and_add(siblings_at(t->gang, cpu), 1);
		__sync_fetch_and_add(&cpu_at(cpu)->runnable, 1);
	}
	t->counted_cpu = cpu;
}

// The CPU that the thread may use with the fewest siblings, then the fewest threads; the previous one if equal.
static s32 find_spread_cpu(struct task_struct *p, struct thread *t, s32 previous)
{
	s32 cpu, best = previous;
	u64 lowest = ~0ULL;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		u32 near = t->gang ? *siblings_at(t->gang, cpu) : 0, load = cpu_at(cpu)->runnable;
		u64 score;
		if (!cpu_at(cpu)->is_online || !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			continue;
		if (t->counted_cpu == cpu) {
			near -= near > 0;
			load -= load > 0;
		}
		score = ((u64)near << 32) | (load << 1) | (cpu != previous);
		if (score < lowest) {
			lowest = score;
			best = cpu;
		}
	}
	return best;
}

// ---- from waking to the queue ----

// An idle CPU for a vCPU: one that its VM owns, else a free one, else any.
static s32 find_idle_cpu(struct task_struct *p, u32 gang, s32 previous)
{
	s32 cpu, round;
	FOR_EACH_NUMBER(round, 0, 4) {
		FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
			u32 owner = cpu_at(cpu)->owner;
			bool fits = round == 0 ? owner == gang && cpu == previous :
				    round == 1 ? owner == gang : round == 2 ? !owner : settings.fill_gaps;
			if (fits && bpf_cpumask_test_cpu(cpu, p->cpus_ptr) && scx_bpf_test_and_clear_cpu_idle(cpu))
				return cpu;
		}
	}
	return -1;
}

SEC("struct_ops/select_cpu")
s32 gang_select_cpu(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	s32 previous = arguments[1], cpu = previous;
	struct thread *t = thread_of(p);
	bool is_idle = false;
	u64 slice = settings.slice_ns;
	if (!t)
		return previous;
	refresh(p, t);
	if (settings.policy != GANG) {
		cpu = find_spread_cpu(p, t, previous);
		move_count(t, cpu);
		is_idle = scx_bpf_test_and_clear_cpu_idle(cpu);
	} else if (t->kind == VCPU) {
		s32 idle = find_idle_cpu(p, t->gang, previous);
		is_idle = idle >= 0;
		if (is_idle)
			cpu = idle;
		slice = 4 * settings.slot_ns;
	} else {
		cpu = scx_bpf_select_cpu_dfl(p, previous, arguments[2], &is_idle);
	}
	if (is_idle && !settings.stall)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice, 0);
	return cpu;
}

// Makes a CPU take a vCPU that was queued: one of its VM that is idle or runs something else, first the one that it used
// last, else a free one.
static void kick_own_cpu(struct task_struct *p, u32 gang)
{
	s32 i, last = scx_bpf_task_cpu(p);
	bool is_found = false;
	FOR_EACH_NUMBER(i, -1, settings.cpus) {
		s32 cpu = i < 0 ? last : i;
		struct cpu *c = cpu_at(cpu);
		if (c->owner != gang || (c->running_gang == gang && c->running_kind == VCPU) ||
		    !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			continue;
		if (c->since && (c->running_kind == VCPU || c->light_ns <= 0)) {
			kick(cpu, SCX_KICK_PREEMPT);
			return;
		}
		// A light task leaves the CPU soon. A CPU that is not in use here may be in use by another scheduling class.
		is_found = true;
		if (c->since)
			continue;
		kick(cpu, SCX_KICK_IDLE);
		if (scx_bpf_test_and_clear_cpu_idle(cpu))
			return;
	}
	if (is_found)
		return;
	FOR_EACH_NUMBER(i, -1, settings.cpus) {
		s32 cpu = i < 0 ? last : i;
		struct cpu *c = cpu_at(cpu);
		if (!c->owner && !c->since && bpf_cpumask_test_cpu(cpu, p->cpus_ptr)) {
			kick(cpu, SCX_KICK_IDLE);
			return;
		}
	}
}

SEC("struct_ops/enqueue")
void gang_enqueue(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	u64 flags = arguments[1], now = bpf_ktime_get_ns(), vtime = p->scx.dsq_vtime;
	struct thread *t = thread_of(p);
	s32 number = scx_bpf_task_cpu(p);
	struct cpu *cpu = cpu_at(number);
	u64 slice = settings.slice_ns;
	make_up_for_kicks();
	if (!t || (p->flags & PF_KTHREAD && p->nr_cpus_allowed == 1)) {
		// The kernel's own threads of a CPU: softirqs, work queues.
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice, flags | (flags & SCX_ENQ_WAKEUP ? SCX_ENQ_PREEMPT : 0));
		return;
	}
	refresh(p, t);
	if (t->kind == VCPU && settings.stall)
		return;	// for the test of the kernel's watchdog: the task is lost
	if (t->kind != VCPU && is_light(t, now)) {
		t->is_light = 1;
		scx_bpf_dsq_insert(p, DSQ_LIGHT, slice, flags);
		if (settings.policy != GANG)
			move_count(t, -1);
		kick(number, cpu->since && takes_light(cpu, now) ? SCX_KICK_PREEMPT : SCX_KICK_IDLE);
	} else if (settings.policy != GANG) {
		u64 weight = t->gang ? settings.weights[t->gang & (MAX_GANGS - 1)] : p->scx.weight;
		if (!(flags & SCX_ENQ_WAKEUP) || !cpu->is_online)
			number = find_spread_cpu(p, t, number);
		if (!cpu_at(number)->is_online)
			has_stranded = 1;
		move_count(t, number);
		scx_bpf_dsq_insert(p, DSQ_CPU(number), slice * (weight ?: 100) / 100, flags);
		kick(number, SCX_KICK_IDLE);
	} else if (t->kind == VCPU) {
		scx_bpf_dsq_insert(p, DSQ_GANG(t->gang), 4 * settings.slot_ns, flags);
		// In a gang wider than its CPUs, a vCPU that yields leaves its CPU to a sibling, and the others are busy.
		if (flags & SCX_ENQ_WAKEUP || cpu->owner != t->gang ||
		    gang_at(t->gang)->runnable <= gang_at(t->gang)->granted)
			kick_own_cpu(p, t->gang);
	} else {
		if (is_before(vtime, ordinary_vtime - slice))
			vtime = ordinary_vtime - slice;
		scx_bpf_dsq_insert_vtime(p, DSQ_ORDINARY, slice, vtime, flags);
		kick(number, SCX_KICK_IDLE);
	}
}

// ---- from the queue to the CPU ----

// Moves a waiting thread that may run on this CPU to it: the one with this number; or, if `pid` is 0, a vCPU of the gang
// that did not spin before it lost its CPU, or (`is_same` is false) a thread that is not of the gang.
static bool move_thread(s32 number, u64 dsq, u32 gang, bool is_same, s32 pid)
{
	struct task_struct *p;
	u32 scanned = 0;
	FOR_EACH_QUEUED(p, dsq) {
		struct thread *t = thread_of(p);
		if (++scanned > MAX_SCANNED_TASKS)
			break;
		// The kernel removes a scheduler that moves a thread to a CPU outside its affinity.
		if (!t || !bpf_cpumask_test_cpu(number, p->cpus_ptr))
			continue;
		if (pid) {
			if (p->pid != pid)
				continue;
		} else {
			if ((t->gang == gang) != is_same)
				continue;
			if (is_same && is_before(t->started, t->last_spin))
				continue;
		}
		if (scx_bpf_dsq_move(&queued, p, SCX_DSQ_LOCAL, 0))
			return true;
	}
	return false;
}

// Moves to this CPU the vCPU to which KVM yielded, else another waiting sibling that did not spin.
static bool move_sibling(u32 gang, s32 pid, s32 number)
{
	s32 cpu;
	if (settings.policy == GANG)
		return (pid && move_thread(number, DSQ_GANG(gang), gang, true, pid)) ||
		       move_thread(number, DSQ_GANG(gang), gang, true, 0);
	if (pid)
		FOR_EACH_NUMBER(cpu, 0, settings.cpus)
			if (*siblings_at(gang, cpu) > 0 && move_thread(number, DSQ_CPU(cpu), gang, true, pid))
				return true;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus)
		if (*siblings_at(gang, cpu) > 0 && move_thread(number, DSQ_CPU(cpu), gang, true, 0))
			return true;
	return false;
}

// Takes a vCPU of the gang, preferably the one that ran here before.
static bool take_vcpu(u32 gang, s32 number)
{
	struct task_struct *p;
	u32 scanned = 0;
	if (scx_bpf_dsq_nr_queued(DSQ_GANG(gang)) > 1 && gang_at(gang)->runnable <= gang_at(gang)->granted) {
		FOR_EACH_QUEUED(p, DSQ_GANG(gang)) {
			struct thread *t = thread_of(p);
			if (++scanned > MAX_SCANNED_TASKS)
				break;
			if (t && t->cpu == number && bpf_cpumask_test_cpu(number, p->cpus_ptr) &&
			    scx_bpf_dsq_move(&queued, p, SCX_DSQ_LOCAL, 0))
				return true;
		}
	}
	return scx_bpf_dsq_move_to_local(DSQ_GANG(gang));
}

// Fills a gap: with the VM that this slot's gaps are for, else with the one of the lowest virtual time.
GLOBAL u32 find_filler(void)
{
	u32 gang, best = 0;
	u64 lowest = 0;
	if (rotation.filler && scx_bpf_dsq_nr_queued(DSQ_GANG(rotation.filler)) > 0)
		return rotation.filler;
	FOR_EACH_NUMBER(gang, 1, settings.gangs + 1) {
		u64 vtime = gang_at(gang)->vtime;
		if (gang_at(gang)->runnable <= 0 || scx_bpf_dsq_nr_queued(DSQ_GANG(gang)) <= 0)
			continue;
		if (!best || is_before(vtime, lowest)) {
			best = gang;
			lowest = vtime;
		}
	}
	return best;
}

// Takes a thread that waits in the queue of a CPU that went offline.
static bool take_stranded(void)
{
	s32 other;
	bool is_left = false;
	if (!has_stranded)
		return false;
	FOR_EACH_NUMBER(other, 0, settings.cpus)
		if (!cpu_at(other)->is_online && scx_bpf_dsq_nr_queued(DSQ_CPU(other)) > 0) {
			if (scx_bpf_dsq_move_to_local(DSQ_CPU(other)))
				return true;
			is_left = true;
		}
	has_stranded = is_left;
	return false;
}

static void dispatch_spread(s32 number, struct task_struct *staying)
{
	struct cpu *cpu = cpu_at(number);
	u32 gang = cpu->wants_gang;
	s32 other, pid = cpu->wants_pid;
	if (take_stranded())
		return;
	if (gang) {
		cpu->wants_gang = 0;
		if (move_sibling(gang, pid, number)) {
			__sync_fetch_and_add(&report_at(gang)->directed_yields, 1);
			return;
		}
	}
	gang = cpu->avoids_gang;
	if (gang) {
		cpu->avoids_gang = 0;
		if (move_thread(number, DSQ_CPU(number), gang, false, 0))
			return;
	}
	if (scx_bpf_dsq_move_to_local(DSQ_CPU(number)) || scx_bpf_dsq_move_to_local(DSQ_LIGHT))
		return;
	if (staying) {
		set_slice(staying, settings.slice_ns);
		return;
	}
	FOR_EACH_NUMBER(other, 0, settings.cpus)
		if (other != number && scx_bpf_dsq_nr_queued(DSQ_CPU(other)) > 0 &&
		    scx_bpf_dsq_move_to_local(DSQ_CPU(other)))
			return;
}

// Whether the gang owns a CPU that this vCPU may use, and that is idle or runs a vCPU of another gang. Two gangs may each run
// on a CPU of the other: then each vCPU must leave its CPU before the other one can come.
static bool has_place_elsewhere(struct task_struct *p, u32 gang)
{
	s32 cpu;
	// The kernel does not pass a task that exits to gang_enqueue.
	if (p->flags & PF_EXITING)
		return false;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		struct cpu *c = cpu_at(cpu);
		if (c->owner != gang || !c->is_online || !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
			continue;
		if (c->since ? c->running_kind == VCPU && c->running_gang != gang : scx_bpf_test_and_clear_cpu_idle(cpu))
			return true;
	}
	return false;
}

SEC("struct_ops/dispatch")
void gang_dispatch(u64 *arguments)
{
	s32 number = arguments[0];
	struct task_struct *previous = (void *)arguments[1];
	struct cpu *cpu = cpu_at(number);
	struct thread *t = previous ? thread_of(previous) : NULL;
	bool stays = previous && previous->scx.flags & SCX_TASK_QUEUED, is_own = false;
	u32 owner = cpu->owner, filler, gang;
	u64 now = bpf_ktime_get_ns();
	if (t)
		refresh(previous, t);
	if (takes_light(cpu, now) && scx_bpf_dsq_move_to_local(DSQ_LIGHT))
		return;
	if (settings.policy != GANG) {
		dispatch_spread(number, stays ? previous : NULL);
		return;
	}
	gang = cpu->wants_gang;
	if (gang) {
		cpu->wants_gang = 0;
		if (gang == owner && move_sibling(gang, cpu->wants_pid, number)) {
			__sync_fetch_and_add(&report_at(gang)->directed_yields, 1);
			return;
		}
	}
	if (is_gang(owner)) {
		if (take_vcpu(owner, number))
			return;
		is_own = stays && t && t->kind == VCPU && t->gang == owner;
		if (is_own) {
			set_slice(previous, 4 * settings.slot_ns);
			return;
		}
	}
	if (scx_bpf_dsq_move_to_local(DSQ_ORDINARY))
		return;
	if (stays && t && t->kind != VCPU) {
		set_slice(previous, settings.slice_ns);
		return;
	}
	if (settings.fill_gaps) {
		filler = find_filler();
		if (filler && !(stays && t && t->gang == rotation.filler) && take_vcpu(filler, number))
			return;
	}
	if (!takes_light(cpu, now) && scx_bpf_dsq_move_to_local(DSQ_LIGHT))
		return;
	// Without a new slice the kernel enqueues the previous thread (SCX_OPS_ENQ_LAST). So it leaves this CPU, and
	// gang_enqueue kicks a CPU of its own gang.
	if (stays && !(t && t->kind == VCPU && t->gang != owner && has_place_elsewhere(previous, t->gang)))
		set_slice(previous, t && t->kind == VCPU ? 4 * settings.slot_ns : settings.slice_ns);
}

// ---- slots ----

// The delay, or a longer one for the least interval between rotations.
static u64 limit_delay(u64 now, u64 delay)
{
	u64 earliest = last_rotation + MIN_ROTATION_INTERVAL_NS;
	return is_before(now + delay, earliest) ? earliest - now : delay;
}

static void rotate_soon(u64 delay)
{
	u32 key = 0;
	struct slot_timer *timer = bpf_map_lookup_elem(&timers, &key);
	delay = limit_delay(bpf_ktime_get_ns(), delay);
	if (timer)
		bpf_timer_start(&timer->timer, delay, 0);
}

SEC("struct_ops/runnable")
void gang_runnable(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	struct thread *t = thread_of(p);
	struct gang *gang;
	s32 before;
	u64 now;
	if (!t)
		return;
	refresh(p, t);
	t->is_runnable = 1;
	if (t->kind != VCPU)
		return;
	t->seat = p->nr_cpus_allowed < (s32)rotation.seated ? find_seat(p, t->gang) : -1;
	gang = gang_at(t->gang);
	before = gang->runnable;
	count_runnable(t, 1);
	if (settings.policy != GANG)
		return;
	now = bpf_ktime_get_ns();
	if (!before && is_before(gang->vtime, vtime_now - 2 * settings.slot_ns))
		gang->vtime = vtime_now - 2 * settings.slot_ns;
	if (rotation.free && before >= gang->granted) {
		rotate_soon(MIN_DELAY_NS);
	} else if (!before && is_before(gang->vtime, vtime_now - settings.slot_ns)) {
		// It has slept and is owed more than a slot: it need not wait for the slot's end.
		rotation.preempts = 1;
		rotate_soon(is_before(now, slot_start + MIN_SLOT_NS) ? slot_start + MIN_SLOT_NS - now : MIN_DELAY_NS);
	}
}

SEC("struct_ops/running")
void gang_running(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	struct thread *t = thread_of(p);
	s32 number = scx_bpf_task_cpu(p);
	struct cpu *cpu = cpu_at(number);
	u64 now = bpf_ktime_get_ns();
	if (!t)
		return;
	t->started = now;
	t->cpu = number;
	cpu->running_gang = t->gang;
	cpu->running_kind = t->kind;
	cpu->since = now;
	if (settings.policy != GANG)
		move_count(t, number);
	else if (t->kind != VCPU && is_before(ordinary_vtime, p->scx.dsq_vtime))
		ordinary_vtime = p->scx.dsq_vtime;
	else if (t->kind == VCPU && cpu->owner == t->gang && scx_bpf_dsq_nr_queued(DSQ_GANG(t->gang)) > 0 &&
		 gang_at(t->gang)->runnable <= gang_at(t->gang)->granted)
		// Siblings that were queued at the same time may all have kicked this CPU: another one is kicked for the next.
		// Their affinity is taken to be that of this one.
		kick_own_cpu(p, t->gang);
}

SEC("struct_ops/stopping")
void gang_stopping(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	struct thread *t = thread_of(p);
	s32 number = scx_bpf_task_cpu(p);
	struct cpu *cpu = cpu_at(number);
	u64 now = bpf_ktime_get_ns(), used;
	if (!t)
		return;
	charge(number, now, 0);
	cpu->running_gang = 0;
	cpu->running_kind = ORDINARY_TASK;
	if (t->kind == VCPU)
		return;
	used = now - t->started;
	t->credit -= used;
	if (settings.policy == GANG) {
		if (is_gang(cpu->owner))
			account_light(cpu, 0, used);
	} else if (t->is_light) {
		account_light(cpu, now - cpu->light_at, used);
		cpu->light_at = now;
	}
	t->is_light = 0;
	used = used * 100 / (p->scx.weight ?: 100);
	if (&scx_bpf_task_set_dsq_vtime)
		scx_bpf_task_set_dsq_vtime(p, p->scx.dsq_vtime + used);
	else
		p->scx.dsq_vtime += used;
}

SEC("struct_ops/quiescent")
void gang_quiescent(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	struct thread *t = thread_of(p);
	if (!t || !t->is_runnable)
		return;
	t->is_runnable = 0;
	if (settings.policy != GANG)
		move_count(t, -1);
	if (t->kind != VCPU)
		return;
	count_runnable(t, -1);
	if (settings.policy == GANG && gang_at(t->gang)->runnable <= 0)
		rotate_soon(MIN_DELAY_NS);	// the CPUs of this VM are free
}

// sched_yield(2): `to` is NULL. yield_to() of KVM, after a pause-loop exit or a call of the guest: `to` is the vCPU that
// KVM picked, and true makes KVM's caller reschedule.
SEC("struct_ops/yield")
bool gang_yield(u64 *arguments)
{
	struct task_struct *from = (void *)arguments[0], *to = (void *)arguments[1];
	struct thread *t = thread_of(from);
	struct cpu *cpu = cpu_at(scx_bpf_task_cpu(from));
	u64 now = bpf_ktime_get_ns();
	struct gang *gang;
	if (!t || t->kind != VCPU) {
		set_slice(from, 0);
		return to != NULL;
	}
	gang = gang_at(t->gang);
	__sync_fetch_and_add(&report_at(t->gang)->yields, 1);
	t->last_spin = now;
	// All siblings run: there is nothing to yield to.
	if (settings.policy == GANG && cpu->owner == t->gang && scx_bpf_dsq_nr_queued(DSQ_GANG(t->gang)) <= 0)
		return false;
	set_slice(from, 0);
	if (settings.policy == SPREAD || now - gang->last_yield >= settings.yield_interval_ns) {
		gang->last_yield = now;
		cpu->wants_pid = to ? to->pid : 0;
		cpu->wants_gang = t->gang;
	} else {
		cpu->avoids_gang = t->gang;
	}
	return to != NULL;
}

// CPUs on which runnable vCPUs of the gang can run at once. Those with a seat at the same CPU share it.
GLOBAL u32 count_width(u32 number, u32 usable)
{
	struct gang *gang = gang_at(number);
	u32 runnable = gang->runnable > 0 ? gang->runnable : 0, width;
	s32 cpu;
	rotation.sharing = 0;
	if (gang->seated > 0)
		FOR_EACH_NUMBER(cpu, 0, settings.cpus)
			if (*seats_at(number, cpu) > 1)
				rotation.sharing += *seats_at(number, cpu) - 1;
	width = runnable > rotation.sharing ? runnable - rotation.sharing : 0;
	return width < usable ? width : usable;
}

// CPUs that the gang lacks for that.
GLOBAL u32 count_missing(u32 number, u32 usable)
{
	u32 width = count_width(number, usable), granted = gang_at(number)->granted;
	return width > granted ? width - granted : 0;
}

// Whether each CPU is free at which threads of the gang have a seat and which it does not have yet.
GLOBAL u32 has_free_seats(u32 gang)
{
	s32 cpu;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		u32 owner = cpu_at(cpu)->next_owner;
		if (*seats_at(gang, cpu) > 0 && owner && owner != gang)
			return 0;
	}
	return 1;
}

// The gang with the lowest virtual time that fits into the free CPUs. A gang whose home has no room for it may wait a slot
// longer than others.
GLOBAL u32 choose_gang(u32 usable)
{
	u32 gang;
	u64 lowest = 0;
	rotation.best = 0;
	FOR_EACH_NUMBER(gang, 1, settings.gangs + 1) {
		struct gang *g = gang_at(gang);
		u32 missing, home = home_of(gang);
		u64 vtime = g->vtime;
		if (g->runnable <= 0 || g->is_chosen)
			continue;
		if (rotation.best && !is_before(vtime, lowest))
			continue;
		missing = count_missing(gang, usable);
		if (!missing || missing > rotation.free || !has_free_seats(gang))
			continue;
		if (home < MAX_NODES && missing > node_at(home)->free)
			vtime += settings.slot_ns;
		if (rotation.best && !is_before(vtime, lowest))
			continue;
		rotation.best = gang;
		rotation.best_vtime = g->vtime;
		lowest = vtime;
	}
	return rotation.best;
}

INLINE void grant(u32 gang, s32 cpu)
{
	struct node *node = node_at(node_of(cpu));
	cpu_at(cpu)->next_owner = gang;
	gang_at(gang)->granted++;
	node->free -= node->free > 0;
	rotation.free--;
	rotation.need -= rotation.need > 0;
}

// The node on which the gang gets CPUs. Among nodes with enough free CPUs: the one with most CPUs that it has in this slot
// already, then its home, then the one with most CPUs that it had last, then the one with the fewest free CPUs. If no node
// has enough: its home, then the one with the most free CPUs.
GLOBAL u32 choose_node(u32 gang)
{
	u32 best = NO_NODE, home = home_of(gang), need = rotation.need;
	u64 highest = 0;
	s32 cpu, node;
	FOR_EACH_NUMBER(node, 0, MAX_NODES)
		node_at(node)->granted = node_at(node)->recent = 0;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		struct cpu *c = cpu_at(cpu);
		struct node *n = node_at(node_of(cpu));
		if (c->next_owner == gang)
			n->granted++;
		else if (c->is_online && !c->next_owner && (c->owner == gang || c->last_owner == gang))
			n->recent++;
	}
	FOR_EACH_NUMBER(node, 0, MAX_NODES) {
		struct node *n = node_at(node);
		u64 score = (u64)((u32)node == home) << 32;
		if (!n->free)
			continue;
		if (n->free >= need)
			score |= 1ULL << 63 | (u64)n->granted << 33 | (u64)n->recent << 16 | (MAX_CPUS - n->free);
		else
			score |= n->free;
		if (score > highest) {
			highest = score;
			best = node;
		}
	}
	return best;
}

// Gives the gang CPUs: its seats, then those of the node; among these those that it has, then those that it had last, then
// any. Other nodes follow in the same order.
GLOBAL u32 grant_cpus(u32 gang)
{
	s32 round, cpu;
	u32 node = NO_NODE;
	FOR_EACH_NUMBER(round, 0, 7) {
		if (round == 1 && rotation.need)
			node = choose_node(gang);
		FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
			struct cpu *c = cpu_at(cpu);
			s32 kind = round > 3 ? round - 3 : round;
			bool fits = kind == 0 ? *seats_at(gang, cpu) > 0 : kind == 1 ? c->owner == gang :
				    kind == 2 ? c->last_owner == gang : true;
			if (kind && round <= 3 && node_of(cpu) != node)
				continue;
			if (!c->next_owner && c->is_online && fits && (rotation.need || !round))
				grant(gang, cpu);
		}
	}
	return 0;
}

GLOBAL u32 begin_rotation(u32 is_early)
{
	u32 gang, usable = 0;
	s32 cpu, node;
	FOR_EACH_NUMBER(gang, 1, settings.gangs + 1) {
		gang_at(gang)->granted = 0;
		gang_at(gang)->is_chosen = 0;
	}
	FOR_EACH_NUMBER(node, 0, MAX_NODES)
		node_at(node)->free = 0;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		struct cpu *c = cpu_at(cpu);
		u32 owner = c->owner;
		c->next_owner = 0;
		if (!c->is_online)
			continue;
		usable++;
		if (is_early && is_gang(owner) && gang_at(owner)->runnable > 0) {
			c->next_owner = owner;
			gang_at(owner)->granted++;
		} else if (is_early && owner == ORDINARY) {
			c->next_owner = owner;
		} else {
			rotation.free++;
			node_at(node_of(cpu))->free++;
		}
	}
	return usable;
}

GLOBAL u32 choose_owners(u32 usable)
{
	u32 round __attribute__((unused));
	FOR_EACH_NUMBER(round, 0, settings.gangs) {
		u32 best = choose_gang(usable);
		struct gang *gang = gang_at(best);
		if (!best)
			break;
		if (!rotation.has_chosen && !rotation.is_early && is_before(vtime_now, rotation.best_vtime))
			vtime_now = rotation.best_vtime;
		rotation.has_chosen = 1;
		gang->is_chosen = 1;
		report_at(best)->slots++;
		rotation.need = count_missing(best, usable);
		if (gang->runnable > (s32)count_width(best, usable))
			rotation.is_wide = 1;
		grant_cpus(best);
	}
	return 0;
}

// The VM of the lowest virtual time among those that have no CPU in this slot: its vCPUs fill gaps.
GLOBAL u32 choose_filler(void)
{
	u32 gang;
	rotation.best = 0;
	FOR_EACH_NUMBER(gang, 1, settings.gangs + 1) {
		struct gang *g = gang_at(gang);
		if (g->runnable <= 0 || g->granted)
			continue;
		if (!rotation.best || is_before(g->vtime, rotation.best_vtime)) {
			rotation.best = gang;
			rotation.best_vtime = g->vtime;
		}
	}
	rotation.filler = rotation.best;
	return rotation.best;
}

GLOBAL u32 apply_owners(void)
{
	s32 cpu;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		struct cpu *c = cpu_at(cpu);
		if (c->owner != c->next_owner && is_gang(c->owner))
			c->last_owner = c->owner;
		c->owner = c->next_owner;
	}
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		struct cpu *c = cpu_at(cpu);
		u32 owner = c->owner;
		bool runs = c->since != 0, is_own = owner == ORDINARY ? c->running_kind != VCPU : c->running_gang == owner;
		if (!c->is_online)
			continue;
		if (owner && runs && (!is_own || (is_gang(owner) && gang_at(owner)->runnable > gang_at(owner)->granted))) {
			kick(cpu, SCX_KICK_PREEMPT);
			report.kicks++;
		} else if (!runs) {
			kick(cpu, SCX_KICK_IDLE);
		}
	}
	return 0;
}

GLOBAL u32 charge_all(u64 now)
{
	s32 cpu;
	u64 elapsed = now - last_rotation;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus) {
		struct cpu *c = cpu_at(cpu);
		if (c->since)
			charge(cpu, now, now);
		account_light(c, elapsed, 0);
	}
	return 0;
}

GLOBAL u32 own_all(void)
{
	s32 cpu;
	FOR_EACH_NUMBER(cpu, 0, settings.cpus)
		cpu_at(cpu)->next_owner = ORDINARY;
	return 0;
}

// Ends the slot, or within a slot only gives free CPUs to gangs that became runnable.
static void rotate(void)
{
	u64 now = bpf_ktime_get_ns(), length = settings.slot_ns;
	bool is_early = is_before(now + EARLY_NS, slot_end) && !rotation.preempts;
	bool has_ordinary = scx_bpf_dsq_nr_queued(DSQ_ORDINARY) > 0 || scx_bpf_dsq_nr_queued(DSQ_LIGHT) > 0;
	u32 usable;
	charge_all(now);
	if (has_ordinary)
		ordinary_credit += (now - last_rotation) * settings.ordinary_percent / 100;
	else if (ordinary_credit > 0)
		ordinary_credit = 0;
	if (ordinary_credit > (s64)settings.slot_ns)
		ordinary_credit = settings.slot_ns;
	last_rotation = now;
	rotation.preempts = 0;
	rotation.free = 0;
	rotation.has_chosen = 0;
	rotation.is_early = is_early;
	if (!is_early)
		rotation.is_wide = 0;
	usable = begin_rotation(is_early);
	rotation.seated = usable;
	if (!is_early && has_ordinary && ordinary_credit >= (s64)(settings.slot_ns / 2)) {
		own_all();
		rotation.free = 0;
		length = settings.slot_ns / 2;
		ordinary_credit -= length;
		report.ordinary_slots++;
	} else {
		choose_owners(usable);
	}
	if (!is_early) {
		slot_start = now;
		slot_end = now + length;
		choose_filler();
	}
	apply_owners();
	report.rotations++;
}

static int on_slot(void *map, u32 *key, struct slot_timer *timer)
{
	u64 now, delay;
	if (!is_attached)
		return 0;
	rotate();
	now = bpf_ktime_get_ns();
	delay = is_before(now + MIN_DELAY_NS, slot_end) ? slot_end - now : MIN_DELAY_NS;
	if (rotation.is_wide && delay > WIDE_SLICE_NS)
		delay = WIDE_SLICE_NS;
	bpf_timer_start(&timer->timer, limit_delay(now, delay), 0);
	return 0;
}

// ---- tasks, CPUs, the program ----

SEC("struct_ops.s/init_task")
s32 gang_init_task(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	struct thread *t = bpf_task_storage_get(&threads, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t)
		return -12;
	t->cpu = t->counted_cpu = t->seat = -1;
	t->generation = 0;
	return 0;
}

SEC("struct_ops/exit_task")
void gang_exit_task(u64 *arguments)
{
	struct task_struct *p = (void *)arguments[0];
	struct thread *t = thread_of(p);
	if (!t)
		return;
	if (t->is_runnable)
		count_runnable(t, -1);
	if (t->kind == VCPU)
		__sync_fetch_and_add(&gang_at(t->gang)->threads, -1);
	move_count(t, -1);
	t->is_runnable = 0;
	t->kind = ORDINARY_TASK;
	t->gang = 0;
	t->generation = 0;
}

SEC("struct_ops/cpu_online")
void gang_cpu_online(u64 *arguments)
{
	cpu_at(arguments[0])->is_online = 1;
}

SEC("struct_ops/cpu_offline")
void gang_cpu_offline(u64 *arguments)
{
	struct cpu *cpu = cpu_at(arguments[0]);
	cpu->is_online = 0;
	cpu->owner = 0;
	has_stranded = 1;
}

SEC("struct_ops.s/init")
s32 gang_init(u64 *arguments)
{
	const struct cpumask *online = scx_bpf_get_online_cpumask();
	struct slot_timer *timer;
	s32 i, error;
	u32 key = 0;
	rotation.seated = 0;
	report.has_exited = 0;
	FOR_EACH_NUMBER(i, 0, settings.cpus) {
		struct cpu *cpu = cpu_at(i);
		cpu->owner = cpu->running_gang = cpu->running_kind = cpu->wants_gang = cpu->avoids_gang = 0;
		cpu->since = 0;
		cpu->is_online = bpf_cpumask_test_cpu(i, online);
		rotation.seated += cpu->is_online;
	}
	scx_bpf_put_cpumask(online);
	error = scx_bpf_create_dsq(DSQ_LIGHT, -1);
	if (!error)
		error = scx_bpf_create_dsq(DSQ_ORDINARY, -1);
	FOR_EACH_NUMBER(i, 0, settings.cpus)
		if (!error)
			error = scx_bpf_create_dsq(DSQ_CPU(i), -1);
	FOR_EACH_NUMBER(i, 1, settings.gangs + 1)
		if (!error)
			error = scx_bpf_create_dsq(DSQ_GANG(i), -1);
	if (error || settings.policy != GANG)
		return error;
	last_rotation = slot_end = bpf_ktime_get_ns();
	is_attached = 1;
	timer = bpf_map_lookup_elem(&timers, &key);
	if (!timer)
		return -3;
	// Refused if it was attached before: the timer stays initialized.
	bpf_timer_init(&timer->timer, &timers, 1 /* CLOCK_MONOTONIC */);
	bpf_timer_set_callback(&timer->timer, on_slot);
	return bpf_timer_start(&timer->timer, settings.slot_ns, 0);
}

SEC("struct_ops/exit")
void gang_exit(u64 *arguments)
{
	struct scx_exit_info *info = (void *)arguments[0];
	is_attached = 0;
	report.exit_kind = info->kind;
	report.exit_code = info->exit_code;
	bpf_probe_read_kernel_str(report.reason, sizeof report.reason, info->reason);
	bpf_probe_read_kernel_str(report.message, sizeof report.message, info->msg);
	report.has_exited = 1;
}

#define OPERATIONS                                                                                                     \
	.select_cpu = (void *)gang_select_cpu, .enqueue = (void *)gang_enqueue, .dispatch = (void *)gang_dispatch,     \
	.runnable = (void *)gang_runnable, .running = (void *)gang_running, .stopping = (void *)gang_stopping,         \
	.quiescent = (void *)gang_quiescent, .yield = (void *)gang_yield, .cpu_online = (void *)gang_cpu_online,       \
	.cpu_offline = (void *)gang_cpu_offline, .init_task = (void *)gang_init_task,                                  \
	.exit_task = (void *)gang_exit_task, .init = (void *)gang_init, .exit = (void *)gang_exit,                     \
	.timeout_ms = 5000, .name = "pagefold_gang"

// Schedules all tasks that EEVDF would schedule.
SEC(".struct_ops.link") struct sched_ext_ops whole_host = { OPERATIONS, .flags = SCX_OPS_ENQ_LAST };
// Schedules only the threads with the policy SCHED_EXT.
SEC(".struct_ops.link") struct sched_ext_ops selected_threads = {
	OPERATIONS, .flags = SCX_OPS_ENQ_LAST | SCX_OPS_SWITCH_PARTIAL
};

char _license[] SEC("license") = "GPL";
