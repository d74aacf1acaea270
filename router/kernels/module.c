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

static bool add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    bool ok = type && !PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return ok;
}

static int filled(PyObject *module) {
    PyObject *terms = term_names();
    int failed = !terms || PyModule_AddObjectRef(module, "TERMS", terms);
    Py_XDECREF(terms);
    if (failed || !add_type(module, "BlockMasks", &block_masks) || !add_type(module, "RecentBlocks", &recent_blocks))
        return -1;
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)filled}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_compiled", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModuleDef_Init(&definition); }
