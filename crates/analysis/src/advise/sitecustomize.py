# Times full garbage collections of children, and of parents after a fork, for one run of `faultless
# advise`. The interpreter imports this module at its start, and the module imports the program's
# own sitecustomize. Python 3.7 and later have gc.freeze and os.register_at_fork.
import sys


def trace_collections():
    import gc, os, time

    file = os.environ.get("FAULTLESS_COLLECTIONS")
    if not file or not hasattr(gc, "freeze") or not hasattr(os, "register_at_fork"):
        return
    # Memory blocks of objects. Their count writes to no object, so it copies no page.
    blocks = getattr(sys, "getallocatedblocks", lambda: 0)
    now = time.thread_time_ns
    state = {"child": False, "collected": False, "inherited": 0, "begin": 0, "blocks": 0}

    def write(*words):
        out = os.open(file, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(out, (" ".join(str(word) for word in words) + "\n").encode())
        finally:
            os.close(out)

    def before():
        # The collection that the advice adds before the first fork.
        if not state["collected"]:
            state["collected"] = True
            begin = now()
            gc.collect()
            write("before", now() - begin)
        state["inherited"] = blocks()

    def in_child():
        state["child"] = True

    def collects(phase, about):
        if about["generation"] != 2 or not (state["child"] or state["inherited"]):
            return
        if phase == "start":
            state["blocks"] = blocks()
            state["begin"] = now()
        else:
            took = now() - state["begin"]
            kind = "child" if state["child"] else "parent"
            write(kind, os.getpid(), took, state["inherited"], state["blocks"])

    gc.callbacks.append(collects)
    os.register_at_fork(before=before, after_in_child=in_child)


def import_own():
    import importlib.machinery, importlib.util, os

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec and spec.loader:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    trace_collections()
finally:
    import_own()
