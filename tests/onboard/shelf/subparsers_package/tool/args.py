import argparse
def build():
    p = argparse.ArgumentParser("tool")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--workdir", default="work")
    s = p.add_subparsers(dest="cmd", required=True)
    t = s.add_parser("pretrain", help="train it")
    t.add_argument("--eta", type=float, default=0.2)
    t.add_argument("--rounds", type=int, default=20, choices=range(1, 51))
    t.add_argument("--reg", type=float, default=0.0)
    e = s.add_parser("export")
    e.add_argument("file")
    return p
