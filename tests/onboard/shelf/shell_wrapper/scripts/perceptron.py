import argparse, json, os, random

ap = argparse.ArgumentParser()
ap.add_argument('--out', required=True)
ap.add_argument('--epochs', type=int, default=5)
ap.add_argument('--eta', type=float, default=1.0, help='update size')
ap.add_argument('--decay', type=float, default=1.0, help='eta is multiplied by this after each epoch')
ap.add_argument('--margin', type=float, default=0.0)
ap.add_argument('--averaged', action='store_true', help='averaged perceptron')
ap.add_argument('--ngram', type=int, default=2, choices=[1, 2, 3])
ap.add_argument('--seed', type=int, default=13)
args = ap.parse_args()

# toy data: do names look like elves or dwarves?
gen = random.Random(0)
ELF, DWARF = ['ael', 'lin', 'riel', 'thal', 'ion', 'eth', 'nor', 'el'], ['grim', 'dur', 'bor', 'gim', 'rok', 'in', 'or', 'dain']
def name(parts):
    n = ''.join(gen.choice(parts) for _ in range(gen.randint(2, 3)))
    return ''.join(gen.choice('aeioulrn') if gen.random() < 0.12 else c for c in n)
data = [(name(ELF), 1) for _ in range(300)] + [(name(DWARF), -1) for _ in range(300)]
gen.shuffle(data)
train, dev = data[:400], data[400:]

def feats(w):
    w = '^' + w + '$'
    return [w[i:i + args.ngram] for i in range(len(w) - args.ngram + 1)]

rng = random.Random(args.seed)
W, total, n, eta = {}, {}, 0, args.eta
score = lambda m, fs: sum(m.get(f, 0.0) for f in fs)
for ep in range(1, args.epochs + 1):
    rng.shuffle(train)
    mistakes = 0
    for word, label in train:
        fs = feats(word)
        if label * score(W, fs) <= args.margin:
            mistakes += 1
            for f in fs:
                W[f] = W.get(f, 0.0) + eta * label
        n += 1
        if args.averaged:
            for f in W:
                total[f] = total.get(f, 0.0) + W[f]
    eta *= args.decay
    m = {f: t / n for f, t in total.items()} if args.averaged else W
    acc = sum(label * score(m, feats(word)) > 0 for word, label in dev) / len(dev)
    print('Epoch %2d: mistakes=%d dev accuracy=%.3f' % (ep, mistakes, acc))
json.dump(m, open(os.path.join(args.out, 'weights.json'), 'w'))
print('Final dev accuracy: %.1f%%' % (100 * acc))
