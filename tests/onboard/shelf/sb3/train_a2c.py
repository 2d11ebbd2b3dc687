import argparse

import gymnasium as gym
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

parser = argparse.ArgumentParser()
parser.add_argument("--env", default="CartPole-v1")
parser.add_argument("-n", "--n-timesteps", type=int, default=10_000)
parser.add_argument("--n-envs", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1.5e-3)
parser.add_argument("--n-steps", type=int, default=8)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--gae-lambda", type=float, default=1.0)
parser.add_argument("--ent-coef", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--eval-freq", type=int, default=2500)
parser.add_argument("--n-eval-episodes", type=int, default=10)
parser.add_argument("--verbose", type=int, default=1)
parser.add_argument("--log-folder", "-f", default="logs")
args = parser.parse_args()

env = make_vec_env(args.env, n_envs=args.n_envs, seed=args.seed)
eval_env = Monitor(gym.make(args.env))
eval_env.reset(seed=1000)
callback = EvalCallback(
    eval_env, n_eval_episodes=args.n_eval_episodes, eval_freq=max(args.eval_freq // args.n_envs, 1),
    log_path=args.log_folder, best_model_save_path=args.log_folder,
)
model = A2C(
    "MlpPolicy", env, learning_rate=args.learning_rate, n_steps=args.n_steps, gamma=args.gamma,
    gae_lambda=args.gae_lambda, ent_coef=args.ent_coef, seed=args.seed, verbose=args.verbose, device="cpu",
)
model.learn(args.n_timesteps, callback=callback)
mean_reward, std_reward = evaluate_policy(model, eval_env, n_eval_episodes=args.n_eval_episodes)
print(f"mean_reward:{mean_reward:.2f} +/- {std_reward:.2f}")
