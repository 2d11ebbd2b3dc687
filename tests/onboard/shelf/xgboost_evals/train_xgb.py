import argparse

import xgboost as xgb
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description="XGBoost on Friedman #1")
parser.add_argument("--eta", type=float, default=0.3)
parser.add_argument("--max_depth", type=int, default=6)
parser.add_argument("--subsample", type=float, default=1.0)
parser.add_argument("--lambda", dest="reg_lambda", type=float, default=1.0)
parser.add_argument("--min_child_weight", type=float, default=1.0)
parser.add_argument("--num_round", type=int, default=100)
parser.add_argument("--nthread", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

X, y = make_friedman1(1500, noise=1.0, random_state=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=1 / 3, random_state=1)
dtrain, dtest = xgb.DMatrix(X_train, y_train), xgb.DMatrix(X_test, y_test)

param = {
    "eta": args.eta, "max_depth": args.max_depth, "subsample": args.subsample, "lambda": args.reg_lambda,
    "min_child_weight": args.min_child_weight, "nthread": args.nthread, "seed": args.seed,
    "objective": "reg:squarederror", "eval_metric": "rmse",
}
bst = xgb.train(param, dtrain, args.num_round, evals=[(dtrain, "train"), (dtest, "eval")])
bst.save_model("0001.json")
bst.dump_model("dump.raw.txt")
