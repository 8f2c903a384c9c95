// Runs the kernel of hopper_forward.cu, one block of threads after the other; 0, or 1 if the fibers of one are stuck.
struct Arguments {
    const void *q, *k, *v;
    const float *k_scale;
    const int *starts, *ends;
    signed char *q_codes;
    float *q_scales;
    u32 *o;
    float *lse;
    float factor;
    int batch, heads, kv_heads, n_q, n_k, nk_padded, m_blocks, heads_per_group, tiles, *taken, grid, seed;
};
static const Arguments *arguments;
static Map maps[3];

static void entry(int x) {
    const Arguments &a = *arguments;
    TensorMap map[3];
    for (int i = 0; i < 3; i++) map[i].words[0] = (u64)&maps[i];
    forward(map[0], map[1], map[2], a.k_scale, a.starts, a.ends, a.q_codes, a.q_scales, a.o, a.lse, a.factor, a.heads,
            a.kv_heads, a.batch * a.heads, a.n_q, a.n_k, a.nk_padded, a.m_blocks, a.heads_per_group, a.tiles, a.taken);
    fibers[x].done = true, progress = true;
    for (;;) yield();
}

extern "C" int run(const Arguments *a) {
    arguments = a;
    long d = D, row_q = a->heads * d * 2, row_k = a->kv_heads * d * 2;
    long n_q = a->n_q, n_k = a->n_k, kv = a->batch * a->kv_heads;
    maps[0] = {(char *)a->q, {d, a->heads, n_q, a->batch}, {2, d * 2, row_q, row_q * n_q}, {64, 1, 64, 1}, 2, 128};
    maps[1] = {(char *)a->k, {d, n_k, kv, 1}, {1, d, d * n_k, 0}, {D, BLOCK_N, 1, 1}, 1, D};
    maps[2] = {(char *)a->v, {d, a->kv_heads, n_k, a->batch}, {2, d * 2, row_k, row_k * n_k}, {64, 1, BLOCK_N, 1}, 2,
               128};
    if (sizeof(Shared) > sizeof memory) return 2;
    srand(a->seed);
    gridDim.x = a->grid;
    for (blockIdx.x = 0; blockIdx.x < a->grid; blockIdx.x++) {
        memset(memory, 0x7B, sizeof memory);
        barriers.clear(), copies.clear();
        fibers = std::vector<Fiber>(THREADS);
        warps = std::vector<Meeting>(THREADS / 32);
        all = {};
        for (int x = 0; x < THREADS; x++) {
            Fiber &f = fibers[x];
            f.stack.resize(65536), f.done = false;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
            makecontext(&f.context, (void (*)())entry, 1, x);
        }
        int idle = 0, asleep[THREADS / 32] = {};  // rounds
        for (bool alive = true; alive;) {
            alive = progress = false;
            for (int x = 0; x < THREADS; x++) {
                int &sleep = asleep[x / 32];
                if (x % 32 == 0) sleep = sleep ? sleep - 1 : rand() % 100 ? 0 : rand() % 100;
                if (fibers[x].done) continue;
                alive = true, threadIdx.x = x;
                if (sleep == 0) swapcontext(&scheduler, &fibers[x].context);
            }
            for (size_t i = 0; i < copies.size();) {
                if (rand() % 16) { i++; continue; }
                perform(copies[i]);
                copies.erase(copies.begin() + i);
            }
            idle = progress || !copies.empty() ? 0 : idle + 1;
            if (alive && idle > 200) return 1;
        }
        if (!copies.empty()) return 3;
    }
    return 0;
}
