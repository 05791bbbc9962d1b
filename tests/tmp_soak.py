import sys, time, random
from support.injection import CALLS, disturb_threads
sys.path.insert(0, "protocol")
from test_exceptions_anywhere import sample
begin = time.time()
for name in sys.argv[2:] or CALLS:
    found = disturb_threads(name, sample(int(sys.argv[1])))
    print(name, len(found), f"{time.time()-begin:.0f}s", *found[:3], sep="\n  " if found else " ", flush=True)
