/* The extension module: the table of its kernels. */
#include "kernels.h"

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(chain),
    METHOD(longest_known),
    METHOD(walk),
    METHOD(price),
    METHOD(pool),
    METHOD(keyed_row),
    METHOD(maxima),
    METHOD(uncached),
    METHOD(cheapest),
    METHOD(mixed),
    METHOD(whole_events),
    {NULL, NULL, 0, NULL},
};

static int filled(PyObject *module) {
    PyObject *terms = term_names();
    int failed = !terms || PyModule_AddObjectRef(module, "TERMS", terms);
    Py_XDECREF(terms);
    return failed || add_recent_blocks(module) ? -1 : PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)filled}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compiled", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModuleDef_Init(&definition); }
