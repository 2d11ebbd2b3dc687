from argparse import ArgumentParser

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_score

parser = ArgumentParser()
parser.add_argument('--n_estimators', default=100, type=int)
parser.add_argument('--max_depth', default=None, type=int)
parser.add_argument('--max_features', default='sqrt')
parser.add_argument('--min_samples_leaf', default=1, type=int)
parser.add_argument('--criterion', default='gini')
parser.add_argument('--random_state', default=0, type=int)
parser.add_argument('--cv', default=3, type=int)
parser.add_argument('--n_jobs', default=1, type=int)
args = vars(parser.parse_args())
try:
    args['max_features'] = float(args['max_features'])  # a fraction
except ValueError:
    pass

X, y = load_digits(return_X_y=True)
cv = args.pop('cv')
n_jobs = args.pop('n_jobs')
scores = cross_val_score(RandomForestClassifier(**args), X, y, cv=cv, n_jobs=n_jobs)
print(scores.mean())
