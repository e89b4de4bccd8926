/* Votes of what has happened to segments: counting.py says what this does, and counting_numpy.py, which it is tested against,
 * gives the same to the last bit. The caller holds the GIL. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <math.h>

#define BUCKETS 64
#define WIDTH (BUCKETS + 1)
#define UNIT 1048576.0

static npy_int64 edges[BUCKETS + 1];

typedef struct {
    npy_int64 number, age, pages;
} event;

typedef struct {
    event *of;
    Py_ssize_t count;
} events;

typedef struct {
    const npy_int64 *born, *classes;
    const double *pages;
    double *left;
    npy_int64 *passed;
    npy_intp rows, num_classes;
    npy_int64 base, low[BUCKETS]; /* low: per bucket, the first row that had not left it */
    double *tables[3], *changes[3];
    npy_int64 stranger; /* a class that there is not, if a row is in one */
} work;

/* The numbers of a list, `width` to an event; 0, or -1 and an error. A number that is no int may do anything when it is
 * asked for, to the list too. */
static int read_events(PyObject *list, int width, events *found)
{
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) % width) {
        PyErr_Format(PyExc_TypeError, "no list of events of %d numbers", width);
        return -1;
    }
    PyObject *all = PyList_AsTuple(list);
    found->count = all == NULL ? 0 : PyTuple_GET_SIZE(all) / width;
    found->of = all == NULL ? NULL : PyMem_Calloc(found->count + 1, sizeof(event));
    int good = found->of != NULL;
    if (!good && !PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; good && i < found->count; i++) {
        npy_int64 numbers[3];
        for (int j = 0; good && j < width; j++) {
            numbers[j] = PyLong_AsLongLong(PyTuple_GET_ITEM(all, i * width + j));
            good = numbers[j] != -1 || !PyErr_Occurred();
        }
        if (good) {
            event one = {numbers[0], width == 3 ? numbers[1] : 0, numbers[width - 1]};
            found->of[i] = one;
        }
    }
    Py_XDECREF(all);
    return good ? 0 : -1;
}

/* The data of item `i` of a tuple, if that is an array of `type` with `dims` dimensions, the first `length`; else NULL. */
static void *data_of(PyObject *tuple, int i, int type, int dims, npy_intp length, int is_written)
{
    PyArrayObject *array = (PyArrayObject *)PyTuple_GET_ITEM(tuple, i);
    int good = PyArray_Check(array) && PyArray_TYPE(array) == type && PyArray_NDIM(array) == dims && PyArray_ISCARRAY_RO(array)
        && (!is_written || PyArray_ISWRITEABLE(array)) && (length < 0 || PyArray_DIM(array, 0) == length)
        && (dims == 1 || PyArray_DIM(array, 1) == BUCKETS);
    if (!good) {
        PyErr_Format(PyExc_TypeError, "array %d is none of those that count takes", i);
    }
    return good ? PyArray_DATA(array) : NULL;
}

static int read_arrays(work *at, PyObject *columns, PyObject *tables)
{
    if (!PyTuple_Check(columns) || PyTuple_GET_SIZE(columns) != 5 || !PyTuple_Check(tables) || PyTuple_GET_SIZE(tables) != 3) {
        PyErr_SetString(PyExc_TypeError, "count takes five columns and three tables");
        return -1;
    }
    at->born = data_of(columns, 0, NPY_INT64, 1, -1, 0);
    if (at->born == NULL) {
        return -1;
    }
    at->rows = PyArray_DIM((PyArrayObject *)PyTuple_GET_ITEM(columns, 0), 0);
    at->classes = data_of(columns, 1, NPY_INT64, 1, at->rows, 0);
    at->pages = at->classes == NULL ? NULL : data_of(columns, 2, NPY_DOUBLE, 1, at->rows, 0);
    at->left = at->pages == NULL ? NULL : data_of(columns, 3, NPY_DOUBLE, 1, at->rows, 1);
    at->passed = at->left == NULL ? NULL : data_of(columns, 4, NPY_INT64, 1, BUCKETS, 1);
    at->num_classes = -1;
    for (int i = 0; i < 3; i++) {
        at->tables[i] = at->passed == NULL || (i && at->tables[i - 1] == NULL) ? NULL
            : data_of(tables, i, NPY_DOUBLE, 2, at->num_classes, 1);
        if (at->tables[i] == NULL) {
            return -1;
        }
        at->num_classes = PyArray_DIM((PyArrayObject *)PyTuple_GET_ITEM(tables, 0), 0);
    }
    for (int b = 0; b < BUCKETS; b++) {
        at->low[b] = at->passed[b] > at->base ? at->passed[b] - at->base : 0;
        if (at->low[b] > at->rows) {
            PyErr_Format(PyExc_AssertionError, "%lld rows of %zd have left", (long long)at->low[b], (Py_ssize_t)at->rows);
            return -1;
        }
    }
    return 0;
}

static int are_rows(const work *at, const events *some)
{
    for (Py_ssize_t i = 0; i < some->count; i++) {
        if (some->of[i].number - at->base >= at->rows) {
            PyErr_Format(PyExc_AssertionError, "segment %lld has no row yet", (long long)some->of[i].number);
            return 0;
        }
        if (some->of[i].age < 0) {
            PyErr_Format(PyExc_AssertionError, "segment %lld was used before", (long long)some->of[i].number);
            return 0;
        }
    }
    return 1;
}

/* How many buckets a row had left before. */
static int counted(const work *at, npy_int64 row)
{
    int low = 0, high = BUCKETS;
    while (low < high) {
        int middle = (low + high) / 2;
        if (at->low[middle] > row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int bucket_of(npy_int64 age)
{
    int bucket = 0;
    while (bucket < BUCKETS - 1 && age >= edges[bucket + 1]) {
        bucket++;
    }
    return bucket;
}

/* Votes, whole numbers of 1 / UNIT, for the buckets [begin, end) of a class. */
static void vote(work *at, int table, npy_int64 class_id, int begin, int end, double votes)
{
    if (class_id >= 0 && class_id < at->num_classes) {
        double *change = at->changes[table] + class_id * WIDTH;
        change[begin] += votes;
        change[end] -= votes;
    } else {
        at->stranger = class_id;
    }
}

/* Add a table's changes to it, and forget them. */
static void add(work *at, int table)
{
    for (npy_intp class_id = 0; class_id < at->num_classes; class_id++) {
        double sum = 0, *change = at->changes[table] + class_id * WIDTH, *row = at->tables[table] + class_id * BUCKETS;
        for (int b = 0; b < BUCKETS; b++) {
            sum += change[b];
            row[b] += sum / UNIT;
            change[b] = 0;
        }
        change[BUCKETS] = 0;
    }
}

static void count_uses(work *at, const events *used)
{
    for (Py_ssize_t i = 0; i < used->count; i++) {
        const event *one = used->of + i;
        npy_int64 row = one->number - at->base;
        if (row >= 0) {
            int bucket = bucket_of(one->age), begin = counted(at, row);
            double votes = rint((double)one->pages * UNIT / at->pages[row]);
            vote(at, 0, at->classes[row], bucket, bucket + 1, votes);
            /* Buckets a page has lived through that are not counted yet: it will be missing when they are. */
            vote(at, 1, at->classes[row], begin < bucket ? begin : bucket, bucket + 1, votes);
        }
    }
    if (used->count) {
        add(at, 0);
        add(at, 1);
    }
}

static void take_off(work *at, const events *some)
{
    for (Py_ssize_t i = 0; i < some->count; i++) {
        npy_int64 row = some->of[i].number - at->base;
        if (row >= 0) {
            at->left[row] -= (double)some->of[i].pages;
        }
    }
}

/* The first row that was born after `clock`. */
static npy_intp born_after(const work *at, npy_int64 clock)
{
    npy_intp low = 0, high = at->rows;
    while (low < high) {
        npy_intp middle = (low + high) / 2;
        if (clock < at->born[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static void count_aged(work *at, npy_int64 clock)
{
    npy_int64 high[BUCKETS + 1];
    high[BUCKETS] = 0;
    int is_any = 0;
    for (int b = 0; b < BUCKETS; b++) {
        npy_intp after = born_after(at, clock - edges[b + 1]);
        high[b] = after > at->low[b] ? after : at->low[b];
    }
    for (int b = 0; b < BUCKETS; b++) { /* to have left this bucket and no further one */
        for (npy_int64 row = at->low[b] > high[b + 1] ? at->low[b] : high[b + 1]; row < high[b]; row++) {
            int begin = counted(at, row);
            vote(at, 1, at->classes[row], begin, b + 1, rint(at->left[row] * UNIT / at->pages[row]));
            vote(at, 2, at->classes[row], begin, b + 1, UNIT);
            is_any = 1;
        }
    }
    if (is_any) {
        add(at, 1);
        add(at, 2);
    }
    for (int b = 0; b < BUCKETS; b++) {
        at->passed[b] = high[b] + at->base;
    }
}

static PyObject *count(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != 2) {
        return PyErr_Format(PyExc_TypeError, "count takes two lists of events, columns, tables, base and clock");
    }
    work at = {0};
    events used = {NULL, 0}, gone = {NULL, 0};
    at.base = PyLong_AsLongLong(args[3]);
    npy_int64 clock = at.base == -1 && PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[4]);
    double *changes = NULL;
    /* The arrays last: from there on nobody else's code runs, which might let their memory go. */
    int good = !((at.base == -1 || clock == -1) && PyErr_Occurred()) && read_events(PyTuple_GET_ITEM(args[0], 0), 3, &used) == 0
        && read_events(PyTuple_GET_ITEM(args[0], 1), 2, &gone) == 0 && read_arrays(&at, args[1], args[2]) == 0
        && are_rows(&at, &used) && are_rows(&at, &gone);
    if (good) {
        changes = PyMem_Calloc(3 * at.num_classes * WIDTH + 1, sizeof(double));
        good = changes != NULL || PyErr_NoMemory() != NULL;
    }
    if (good) {
        for (int i = 0; i < 3; i++) {
            at.changes[i] = changes + i * at.num_classes * WIDTH;
        }
        count_uses(&at, &used);
        take_off(&at, &used);
        take_off(&at, &gone);
        count_aged(&at, clock);
        if (at.stranger) {
            PyErr_Format(PyExc_AssertionError, "class %lld of %zd", (long long)at.stranger, (Py_ssize_t)at.num_classes);
            good = 0;
        }
    }
    PyMem_Free(changes);
    PyMem_Free(used.of);
    PyMem_Free(gone.of);
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"count", (PyCFunction)(void (*)(void))count, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_counting", NULL, -1, methods};

PyMODINIT_FUNC PyInit__counting(void)
{
    import_array();
    edges[1] = 1024;
    for (int b = 1; b < BUCKETS; b++) {
        edges[b + 1] = edges[b] * 13 / 10;
    }
    return PyModule_Create(&module);
}
