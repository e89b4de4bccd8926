/* Queues of leaves, one a class, and which leaf goes next: class_queues.py says what this does, and class_queues_python.py, which it is tested
 * against, gives the same. The caller holds the GIL. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <structmember.h>
#include <string.h>

#define BUCKETS 64
#define CLASSES 512
#define FEW 64
#define NEVER ((npy_int64)1 << 60)
#define INFINITE 1e300

static npy_int64 edges[BUCKETS + 1];
static PyObject *entry_name, *node_name, *rows_name, *version_name;

/* A place in a queue. slot: where `places` has it. */
typedef struct {
    npy_int64 used, depth;
    npy_intp slot;
} seat;

/* Seats by last use, of one use by depth, then as they came; those before `begin` have been let go. head: the slot of who goes
 * first, -1 if that is not known, and then rank is a lower bound. until: the clock from which on head or rank may be wrong. */
typedef struct {
    seat *seats;
    npy_intp begin, count, room, most, head;
    npy_int64 until, head_used, head_depth;
    double rank;
    int bucket, class_id;
} class_queue;

/* places: by slot; NULL: void, or the slot is free. queue_of: of a slot; of a free one the next free one. */
typedef struct {
    PyObject_HEAD
    PyObject *tables;
    PyArrayObject *index, *least, *falls;
    class_queue *queues;
    int num_queues, chosen; /* chosen: the queue of the least rank, and of these the least class; -1: not known */
    int of_class[CLASSES];
    PyObject **places;
    npy_intp *queue_of;
    npy_intp num_slots, free_slot;
    double rank;                /* the chosen queue's */
    npy_int64 clock, soonest;   /* for which all is right; when the first of the queues may be wrong, or before */
    long long version;
} ClassQueues;

#define ROW(array, type, class_id) ((const type *)PyArray_DATA(array) + (npy_intp)(class_id) * BUCKETS)

static int bucket_of(npy_int64 age)
{
    int low = 0, high = BUCKETS;
    while (low < high) {
        int middle = (low + high) / 2;
        if (age < edges[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low > 0 ? low - 1 : 0;
}

static npy_int64 leaves(npy_int64 used, int bucket)
{
    return bucket < BUCKETS - 1 ? used + edges[bucket + 1] : NEVER;
}

/* -- slots -- */

static npy_intp new_slot(ClassQueues *self, PyObject *place, npy_intp number)
{
    if (self->free_slot < 0) {
        npy_intp count = self->num_slots, wanted = count ? 2 * count : FEW;
        PyObject **places = PyMem_Realloc(self->places, wanted * sizeof(PyObject *));
        if (places != NULL) {
            self->places = places;
        }
        npy_intp *queue_of = places == NULL ? NULL : PyMem_Realloc(self->queue_of, wanted * sizeof(npy_intp));
        if (queue_of == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->queue_of = queue_of;
        for (npy_intp i = count; i < wanted; i++) {
            places[i] = NULL;
            queue_of[i] = i + 1 < wanted ? i + 1 : -1;
        }
        self->num_slots = wanted;
        self->free_slot = count;
    }
    npy_intp slot = self->free_slot;
    self->free_slot = self->queue_of[slot];
    self->places[slot] = Py_NewRef(place);
    self->queue_of[slot] = number;
    return slot;
}

static void free_slot(ClassQueues *self, npy_intp slot)
{
    self->queue_of[slot] = self->free_slot;
    self->free_slot = slot;
    Py_CLEAR(self->places[slot]);
}

/* -- one queue -- */

/* Where the first seat is that was last used at `used` or later. */
static npy_intp seat_from(const class_queue *of, npy_int64 used)
{
    npy_intp low = of->begin, high = of->count;
    while (low < high) {
        npy_intp middle = (low + high) / 2;
        if (of->seats[middle].used < used) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The first leaf last used at `used` or later, or NULL. Drops the void ones it meets. */
static const seat *first_from(ClassQueues *self, class_queue *of, npy_int64 used)
{
    npy_intp at = used ? seat_from(of, used) : of->begin, end = at;
    while (end < of->count && self->places[of->seats[end].slot] == NULL) {
        free_slot(self, of->seats[end++].slot);
    }
    npy_intp rest = of->count - end;
    if (at == of->begin) {
        of->begin = end;
        if (2 * end > of->count + FEW) {
            memmove(of->seats, of->seats + end, rest * sizeof(seat));
            of->begin = 0;
            of->count = rest;
        }
        at = of->begin;
    } else if (end > at) {
        memmove(of->seats + at, of->seats + end, rest * sizeof(seat));
        of->count = at + rest;
    }
    return at < of->count ? of->seats + at : NULL;
}

/* Forget the head; `rank` is a lower bound. */
static void bound(ClassQueues *self, class_queue *of)
{
    const seat *oldest = first_from(self, of, 0);
    of->head = -1;
    of->rank = INFINITE;
    of->until = NEVER;
    if (oldest != NULL) {
        int bucket = bucket_of(self->clock - oldest->used);
        npy_int64 falls = ROW(self->falls, npy_int64, of->class_id)[bucket];
        of->rank = ROW(self->least, double, of->class_id)[bucket];
        of->until = falls >= 0 && falls < BUCKETS ? oldest->used + edges[falls] : NEVER;
    }
}

/* Find the head: of the age with the least index the oldest, of one path the deepest. */
static void choose(ClassQueues *self, class_queue *of)
{
    const double *index = ROW(self->index, double, of->class_id);
    const seat *found = first_from(self, of, 0);
    if (found == NULL) {
        of->rank = INFINITE;
        of->until = NEVER;
        return;
    }
    seat head = *found;
    int oldest = bucket_of(self->clock - head.used), best = oldest;
    npy_int64 youngest = self->clock - of->seats[of->count - 1].used;
    for (int b = 0; b < oldest; b++) {
        if (edges[b + 1] <= youngest || !(index[b] < index[best] || (index[b] == index[best] && best == oldest))) {
            continue;
        }
        found = first_from(self, of, self->clock - edges[b + 1] + 1);
        if (found != NULL && found->used <= self->clock - edges[b]) {
            best = b;
            head = *found;
        }
    }
    of->head = head.slot;
    of->head_used = head.used;
    of->head_depth = head.depth;
    of->rank = index[best];
    of->bucket = best;
    npy_int64 until = leaves(head.used, best);
    int was_better = 1;
    for (int b = 0; b < BUCKETS; b++) {
        int is_better = index[b] < of->rank || (index[b] == of->rank && b < best);
        if (b && is_better && !was_better && edges[b] > youngest) {
            found = first_from(self, of, self->clock - edges[b] + 1);
            if (found != NULL && found->used + edges[b] < until) {
                until = found->used + edges[b];
            }
        }
        was_better = is_better;
    }
    of->until = until;
}

/* Whether the head, which the place in `one` may be from here on, has another rank or until for it. */
static int compared(ClassQueues *self, class_queue *of, const seat *one)
{
    const double *index = ROW(self->index, double, of->class_id);
    npy_int64 age = self->clock - one->used, until = of->until;
    int bucket = of->bucket;
    if (edges[bucket] <= age && (age < edges[bucket + 1] || bucket == BUCKETS - 1)) {
        if (of->head_used < one->used || (of->head_used == one->used && of->head_depth <= one->depth)) {
            return 0;
        }
    } else {
        bucket = bucket_of(age);
        if (index[bucket] > of->rank || (index[bucket] == of->rank && bucket > of->bucket)) {
            for (int b = bucket + 1; b < BUCKETS; b++) { /* the next age from which on it would go before */
                int is_better = index[b] < of->rank || (index[b] == of->rank && b < of->bucket);
                int was_better = index[b - 1] < of->rank || (index[b - 1] == of->rank && b - 1 < of->bucket);
                if (is_better && !was_better) {
                    of->until = one->used + edges[b] < until ? one->used + edges[b] : until;
                    break;
                }
            }
            return of->until != until;
        }
        of->rank = index[bucket];
    }
    of->head = one->slot;
    of->head_used = one->used;
    of->head_depth = one->depth;
    of->bucket = bucket;
    npy_int64 end = leaves(one->used, bucket);
    of->until = end < until ? end : until;
    return 1;
}

/* 1: the node of a place was merged away; -1: an error. */
static int is_merged(PyObject *place)
{
    PyObject *entry = PyObject_GetAttr(place, entry_name);
    PyObject *node = entry == NULL || entry == Py_None ? Py_XNewRef(entry) : PyObject_GetAttr(entry, node_name);
    int merged = node == NULL ? -1 : node == Py_None;
    Py_XDECREF(entry);
    Py_XDECREF(node);
    return merged;
}

/* Take out the void ones: once as many as all there are have come, so O(1) for each. */
static int sort_out(ClassQueues *self, class_queue *of)
{
    npy_intp kept = 0;
    int status = 0;
    for (npy_intp i = of->begin; i < of->count; i++) {
        seat one = of->seats[i];
        int is_void = self->places[one.slot] == NULL;
        if (!is_void && status == 0 && one.slot != of->head) {
            is_void = is_merged(self->places[one.slot]);
            status = is_void < 0 ? -1 : 0;
            is_void = is_void > 0;
        }
        if (is_void) {
            free_slot(self, one.slot);
        } else {
            of->seats[kept++] = one;
        }
    }
    of->begin = 0;
    of->count = kept;
    of->most = 2 * kept + FEW;
    return status;
}

/* -- all of them -- */

/* Where the tables' index is, for all classes. */
static int look_up(ClassQueues *self)
{
    PyObject *rows = PyObject_CallMethodNoArgs(self->tables, rows_name);
    if (rows == NULL) {
        return -1;
    }
    int good = PyTuple_Check(rows) && PyTuple_GET_SIZE(rows) == 3;
    for (int i = 0; good && i < 3; i++) {
        PyArrayObject *array = (PyArrayObject *)PyTuple_GET_ITEM(rows, i);
        good = PyArray_Check(array) && PyArray_TYPE(array) == (i < 2 ? NPY_DOUBLE : NPY_INT64) && PyArray_NDIM(array) == 2
            && PyArray_DIM(array, 0) == CLASSES && PyArray_DIM(array, 1) == BUCKETS && PyArray_ISCARRAY_RO(array);
    }
    if (good) {
        Py_XSETREF(self->index, (PyArrayObject *)Py_NewRef(PyTuple_GET_ITEM(rows, 0)));
        Py_XSETREF(self->least, (PyArrayObject *)Py_NewRef(PyTuple_GET_ITEM(rows, 1)));
        Py_XSETREF(self->falls, (PyArrayObject *)Py_NewRef(PyTuple_GET_ITEM(rows, 2)));
    } else {
        PyErr_Format(PyExc_TypeError, "no tables of %d classes and %d age buckets", CLASSES, BUCKETS);
    }
    Py_DECREF(rows);
    return good ? 0 : -1;
}

/* A queue may have another rank, which may stand until another time. */
static void looked_at(ClassQueues *self, int number)
{
    const class_queue *of = self->queues + number;
    if (self->chosen == number) {
        if (of->rank > self->rank) {
            self->chosen = -1;
        }
        self->rank = of->rank;
    } else if (self->chosen >= 0) {
        int is_first = of->class_id < self->queues[self->chosen].class_id;
        if (of->rank < self->rank || (of->rank == self->rank && is_first)) {
            self->chosen = number;
            self->rank = of->rank;
        }
    }
    if (of->until < self->soonest) {
        self->soonest = of->until;
    }
}

static void find_least(ClassQueues *self)
{
    for (int i = 0; i < self->num_queues; i++) {
        const class_queue *of = self->queues + i, *best = self->chosen < 0 ? NULL : self->queues + self->chosen;
        if (best == NULL || of->rank < best->rank || (of->rank == best->rank && of->class_id < best->class_id)) {
            self->chosen = i;
            self->rank = of->rank;
        }
    }
}

/* Bring the queues up to `clock` and the tables' index. */
static int settled(ClassQueues *self, npy_int64 clock)
{
    PyObject *number = PyObject_GetAttr(self->tables, version_name);
    long long version = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    if (version == -1 && PyErr_Occurred()) {
        return -1;
    }
    int is_new = version != self->version;
    if (is_new && look_up(self) < 0) {
        return -1;
    }
    self->clock = clock;
    if (!is_new && self->soonest > clock) {
        return 0;
    }
    self->version = version;
    self->soonest = NEVER;
    if (is_new) {
        self->chosen = -1;
    }
    for (int i = 0; i < self->num_queues; i++) {
        if (is_new || self->queues[i].until <= clock) {
            bound(self, self->queues + i);
        }
        looked_at(self, i);
    }
    return 0;
}

static int queue_number(ClassQueues *self, npy_int64 class_id)
{
    if (class_id < 0 || class_id >= CLASSES) {
        PyErr_Format(PyExc_AssertionError, "class %lld is not in [0, %d)", (long long)class_id, CLASSES);
        return -1;
    }
    if (self->of_class[class_id] < 0) {
        class_queue *queues = look_up(self) < 0 ? NULL : PyMem_Realloc(self->queues, (self->num_queues + 1) * sizeof(class_queue));
        if (queues == NULL) {
            return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
        }
        self->queues = queues;
        class_queue fresh = {.most = FEW, .head = -1, .until = NEVER, .rank = INFINITE, .class_id = (int)class_id};
        queues[self->num_queues] = fresh;
        self->of_class[class_id] = self->num_queues++;
    }
    return self->of_class[class_id];
}

/* Put a new seat where it belongs: behind all that are alike. Where that is, or -1. */
static npy_intp seated(class_queue *of, seat one)
{
    if (of->count == of->room) {
        npy_intp room = of->room ? 2 * of->room : 16;
        seat *seats = PyMem_Realloc(of->seats, room * sizeof(seat));
        if (seats == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        of->seats = seats;
        of->room = room;
    }
    npy_intp low = of->begin, high = of->count;
    if (high > low && of->seats[high - 1].used < one.used) {
        low = high;
    }
    while (low < high) {
        npy_intp middle = (low + high) / 2;
        const seat *other = of->seats + middle;
        if (other->used < one.used || (other->used == one.used && other->depth <= one.depth)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    memmove(of->seats + low + 1, of->seats + low, (of->count - low) * sizeof(seat));
    of->seats[low] = one;
    of->count++;
    return low;
}

static PyObject *queues_enter(ClassQueues *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        return PyErr_Format(PyExc_TypeError, "enter takes 4 arguments, not %zd", nargs);
    }
    long long numbers[3];
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyLong_AsLongLong(args[i + 1]);
        if (numbers[i] == -1 && PyErr_Occurred()) {
            return NULL;
        }
    }
    long long class_id = numbers[0], used = numbers[1], depth = numbers[2];
    int number = queue_number(self, class_id);
    npy_intp slot = number < 0 ? -1 : new_slot(self, args[0], number);
    if (slot < 0) {
        return NULL;
    }
    class_queue *of = self->queues + number;
    seat one = {used, depth, slot};
    if (seated(of, one) < 0) {
        free_slot(self, slot);
        return NULL;
    }
    if (of->count > of->most && sort_out(self, of) < 0) {
        return NULL;
    }
    if (of->head >= 0) {
        if (compared(self, of, &one)) {
            looked_at(self, number);
        }
    } else if (of->rank == INFINITE || of->seats[of->begin].slot == slot) { /* else the bound is of one that is older */
        bound(self, of);
        looked_at(self, number);
    }
    return PyLong_FromSsize_t(slot);
}

static PyObject *queues_left(ClassQueues *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        return PyErr_Format(PyExc_TypeError, "left takes 2 arguments, not %zd", nargs);
    }
    Py_ssize_t slot = PyLong_AsSsize_t(args[1]);
    if (slot == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (slot < 0 || slot >= self->num_slots || self->places[slot] != args[0]) {
        Py_RETURN_NONE; /* it was sorted out before */
    }
    int number = (int)self->queue_of[slot];
    class_queue *of = self->queues + number;
    int is_oldest = of->seats[of->begin].slot == slot;
    Py_CLEAR(self->places[slot]);
    if (of->head == slot) {
        const seat *following = first_from(self, of, is_oldest ? 0 : of->head_used);
        if (following != NULL && self->clock - following->used >= edges[of->bucket]) { /* nor is it older */
            of->head = following->slot;
            of->head_used = following->used;
            of->head_depth = following->depth;
        } else {
            bound(self, of);
            looked_at(self, number);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *queues_settle(ClassQueues *self, PyObject *clock_object)
{
    long long clock = PyLong_AsLongLong(clock_object);
    if ((clock == -1 && PyErr_Occurred()) || settled(self, clock) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *queues_first(ClassQueues *self, PyObject *clock_object)
{
    long long clock = PyLong_AsLongLong(clock_object);
    if ((clock == -1 && PyErr_Occurred()) || settled(self, clock) < 0) {
        return NULL;
    }
    for (;;) {
        if (self->chosen < 0) {
            find_least(self);
        }
        if (self->chosen < 0 || self->rank == INFINITE) {
            Py_RETURN_NONE;
        }
        class_queue *of = self->queues + self->chosen;
        if (of->head >= 0) {
            return Py_NewRef(self->places[of->head]);
        }
        choose(self, of);
        looked_at(self, self->chosen);
    }
}

static Py_ssize_t queues_length(ClassQueues *self)
{
    Py_ssize_t count = 0;
    for (int i = 0; i < self->num_queues; i++) {
        count += self->queues[i].count - self->queues[i].begin;
    }
    return count;
}

static PyObject *queues_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tables;
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "O", &tables)) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "ClassQueues are made of tables");
    }
    ClassQueues *self = (ClassQueues *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->tables = Py_NewRef(tables);
    self->chosen = -1;
    self->free_slot = -1;
    self->rank = INFINITE;
    self->soonest = NEVER;
    self->version = -1;
    for (int i = 0; i < CLASSES; i++) {
        self->of_class[i] = -1;
    }
    if (settled(self, 0) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void queues_dealloc(ClassQueues *self)
{
    for (npy_intp i = 0; i < self->num_slots; i++) {
        Py_CLEAR(self->places[i]);
    }
    for (int i = 0; i < self->num_queues; i++) {
        PyMem_Free(self->queues[i].seats);
    }
    PyMem_Free(self->places);
    PyMem_Free(self->queue_of);
    PyMem_Free(self->queues);
    Py_CLEAR(self->tables);
    Py_CLEAR(self->index);
    Py_CLEAR(self->least);
    Py_CLEAR(self->falls);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef queues_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))queues_enter, METH_FASTCALL, NULL},
    {"left", (PyCFunction)(void (*)(void))queues_left, METH_FASTCALL, NULL},
    {"settle", (PyCFunction)queues_settle, METH_O, NULL},
    {"first", (PyCFunction)queues_first, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef queues_members[] = {
    {"rank", T_DOUBLE, offsetof(ClassQueues, rank), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PySequenceMethods queues_sequence = {.sq_length = (lenfunc)queues_length};

static PyTypeObject queues_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hiradix.policy._class_queues.ClassQueues",
    .tp_basicsize = sizeof(ClassQueues),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = queues_new,
    .tp_dealloc = (destructor)queues_dealloc,
    .tp_methods = queues_methods,
    .tp_members = queues_members,
    .tp_as_sequence = &queues_sequence,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_class_queues", NULL, -1, NULL};

PyMODINIT_FUNC PyInit__class_queues(void)
{
    import_array();
    edges[1] = 1024;
    for (int b = 1; b < BUCKETS; b++) {
        edges[b + 1] = edges[b] * 13 / 10;
    }
    entry_name = PyUnicode_InternFromString("entry");
    node_name = PyUnicode_InternFromString("node");
    rows_name = PyUnicode_InternFromString("rows");
    version_name = PyUnicode_InternFromString("version");
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || version_name == NULL || PyType_Ready(&queues_type) < 0
        || PyModule_AddObjectRef(made, "ClassQueues", (PyObject *)&queues_type) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
