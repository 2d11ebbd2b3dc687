"""The tables of the ledger. `events` is the record; the other tables are derived from it, for fast queries."""

from __future__ import annotations

VERSION = 9

JOURNALLED = "journal"
"""Key of `meta` that marks a ledger with a journal; a ledger of an older version gets both with its next event."""
LAST_NUMBER = "last run: "
"""Prefix of the keys of `meta` with the highest run number of a study, for tables that have lost it."""

DRAW_ID = "INSERT OR IGNORE INTO meta VALUES ('ledger', lower(hex(randomblob(8))))"
"""Assign the ledger's random id, once. Ledgers of older versions get theirs with their first anchor."""

PIPELINES = """
CREATE TABLE IF NOT EXISTS stages (          -- one row per attempt; see pipelines.py
    study TEXT NOT NULL,
    folder TEXT NOT NULL,                    -- run folder of the pipeline, relative to the lab
    stage TEXT NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL,                     -- running | complete | failed | stopped | lost
    why TEXT NOT NULL,                       -- why it ran; if it is not complete, why not
    fingerprint TEXT NOT NULL,               -- hash of its inputs
    config TEXT,                             -- hash of the resolved config
    outputs TEXT,                            -- hash of its outputs
    slot TEXT, began REAL NOT NULL, ended REAL, seconds REAL,
    PRIMARY KEY (folder, stage, began)
);
CREATE TABLE IF NOT EXISTS suites (          -- as its last call left it
    study TEXT NOT NULL, id TEXT NOT NULL, folder TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,               -- hash of its stages and configs
    state TEXT NOT NULL,                     -- running | complete | failed | stopped
    jobs TEXT NOT NULL,                      -- state of each dataset, as JSON
    began REAL NOT NULL, ended REAL
);
CREATE TABLE IF NOT EXISTS cases (
    study TEXT NOT NULL, folder TEXT NOT NULL, tag TEXT NOT NULL, exit_code INTEGER NOT NULL, config TEXT,
    files TEXT NOT NULL,                     -- files that it wrote, as JSON
    began REAL NOT NULL, ended REAL NOT NULL,
    PRIMARY KEY (folder, tag, began)
);
CREATE TABLE IF NOT EXISTS versions (        -- of code, one row per attempt; see versions.py
    study TEXT NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT NULL,   -- attempt 0: it existed before
    state TEXT NOT NULL,                     -- baseline | begun | prepared | checked | judged | merged | failed | void
    folder TEXT, branch TEXT,
    revision TEXT,                           -- its commit
    code TEXT,                               -- hash of its folder in that commit: the git tree
    metric TEXT, value REAL, verdict TEXT, why TEXT NOT NULL,
    champion INTEGER NOT NULL,               -- 1: it is the champion
    began REAL, ended REAL,
    PRIMARY KEY (version, attempt)
);
"""

TOTALS = """
CREATE INDEX IF NOT EXISTS runs_totals ON runs (study, status, role, devices, started, ended, state)
    WHERE state = 'ended';                 -- all columns of the totals that `status` shows, so that it reads no rows
"""

LONG_QUEUES = """
CREATE INDEX IF NOT EXISTS proposals_requeued ON proposals (study)
    WHERE status = 'waiting' AND proposer IN ('watch', 'again');
CREATE INDEX IF NOT EXISTS events_attempts ON events (study, run) WHERE kind = 'attempt ended';
"""

FREQUENT = ("proposed", "planned", "launched", "queued", "started", "ended")
"""Kinds of events that every run has."""
IS_RARE = f"kind NOT IN {FREQUENT}"
"""Condition of the index of the other events. A query uses the index only if it repeats the condition."""

RARE_EVENTS = f"""
CREATE INDEX IF NOT EXISTS events_rare ON events (study, kind) WHERE {IS_RARE};
"""

TABLES = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
{DRAW_ID};

CREATE TABLE IF NOT EXISTS studies (
    name TEXT PRIMARY KEY,
    created REAL NOT NULL,
    objective TEXT,              -- metric name
    goal TEXT,                   -- max | min
    best TEXT,                   -- run id of the champion; without a judge, of the best measured run
    judge_state TEXT             -- state of the sequential tests, as JSON
);

CREATE TABLE IF NOT EXISTS rounds (
    study TEXT NOT NULL, n INTEGER NOT NULL, created REAL NOT NULL, closed REAL,
    filled INTEGER NOT NULL DEFAULT 0,     -- 1: all its runs are planned
    PRIMARY KEY (study, n)
);

CREATE TABLE IF NOT EXISTS proposals (
    id INTEGER PRIMARY KEY,
    study TEXT NOT NULL, round INTEGER, created REAL NOT NULL,
    proposer TEXT NOT NULL, source TEXT,   -- source: id of the proposal at its origin, accepted once
    parent TEXT,
    edits TEXT NOT NULL,                   -- a list of edits; of a submitted command: an object, see `Job`
    reason TEXT NOT NULL, hypothesis TEXT NOT NULL DEFAULT '',
    status TEXT NOT NULL,                  -- waiting | accepted | rejected
    problems TEXT,                         -- why it was rejected
    run TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS proposals_source ON proposals (study, source) WHERE source IS NOT NULL;
CREATE INDEX IF NOT EXISTS proposals_waiting ON proposals (study, status) WHERE status = 'waiting';

CREATE TABLE IF NOT EXISTS runs (
    study TEXT NOT NULL, id TEXT NOT NULL, n INTEGER NOT NULL,
    round INTEGER NOT NULL, proposal INTEGER, proposer TEXT NOT NULL, parent TEXT, base TEXT,
    reason TEXT NOT NULL DEFAULT '', config_hash TEXT NOT NULL,
    state TEXT NOT NULL,                   -- planned | queued | running | ended
    status TEXT,                           -- ok | failed | stopped | timeout | lost
    slot TEXT, pid INTEGER, created REAL NOT NULL, started REAL, ended REAL,
    exit_code INTEGER, signal INTEGER, objective REAL, verdict TEXT,
    devices INTEGER NOT NULL DEFAULT 1,
    role TEXT NOT NULL DEFAULT 'trial',    -- base | trial | replicate | control | reproduction | imported
    point TEXT NOT NULL DEFAULT '',        -- hash of the config without its seed
    seed INTEGER,
    twin TEXT,                             -- the run that it repeats
    warm TEXT,                             -- the run whose checkpoint it starts from
    measured TEXT,                         -- hash of its measurements, without times and memory
    attempt INTEGER NOT NULL DEFAULT 1,    -- the current or last attempt
    host TEXT, job TEXT,                   -- machine of that attempt, and its id at the scheduler
    lost_s REAL NOT NULL DEFAULT 0,        -- seconds that earlier attempts ran
    PRIMARY KEY (study, n)
);
CREATE UNIQUE INDEX IF NOT EXISTS runs_id ON runs (study, id);
CREATE INDEX IF NOT EXISTS runs_open ON runs (study, state) WHERE state != 'ended';
CREATE INDEX IF NOT EXISTS runs_measured ON runs (study, measured) WHERE measured IS NOT NULL;
CREATE INDEX IF NOT EXISTS runs_retried ON runs (study) WHERE attempt > 1;
CREATE INDEX IF NOT EXISTS runs_point ON runs (study, point);
CREATE INDEX IF NOT EXISTS runs_objective ON runs (study, objective) WHERE objective IS NOT NULL;

CREATE TABLE IF NOT EXISTS plans (          -- of planned runs; deleted once the run folder exists
    study TEXT NOT NULL, run TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (study, run)
);

CREATE TABLE IF NOT EXISTS configs (        -- of every run, by runs.config_hash; keys in the order of the config
    hash TEXT PRIMARY KEY, body TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS verdicts (
    study TEXT NOT NULL, run TEXT NOT NULL, at REAL NOT NULL, verdict TEXT NOT NULL, evidence TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS sessions (
    id INTEGER PRIMARY KEY, study TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL, ticks INTEGER NOT NULL,
    began REAL NOT NULL, seen REAL NOT NULL, ended REAL, how TEXT
);
CREATE INDEX IF NOT EXISTS sessions_study ON sessions (study);

CREATE TABLE IF NOT EXISTS commands (
    id INTEGER PRIMARY KEY, study TEXT NOT NULL, at REAL NOT NULL, what TEXT NOT NULL, data TEXT NOT NULL, done REAL
);
CREATE INDEX IF NOT EXISTS commands_open ON commands (study) WHERE done IS NULL;

CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, study TEXT NOT NULL, run TEXT,
    data TEXT NOT NULL, hash TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_alarm ON events (study) WHERE kind = 'alarm';
CREATE INDEX IF NOT EXISTS events_configured ON events (study) WHERE kind = 'study configured';
CREATE INDEX IF NOT EXISTS events_agents ON events (study) WHERE kind IN ('agent asked', 'agent answered');
{PIPELINES}{LONG_QUEUES}{RARE_EVENTS}{TOTALS}"""

UPGRADES = {
    1: """
ALTER TABLE studies ADD COLUMN docket TEXT;
ALTER TABLE runs ADD COLUMN role TEXT NOT NULL DEFAULT 'trial';
ALTER TABLE runs ADD COLUMN point TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN seed INTEGER;
ALTER TABLE runs ADD COLUMN twin TEXT;
ALTER TABLE runs ADD COLUMN warm TEXT;
CREATE INDEX runs_point ON runs (study, point);
UPDATE runs SET role='base' WHERE proposer='base';
UPDATE runs SET point=config_hash;
""",
    2: """
ALTER TABLE runs ADD COLUMN measured TEXT;
DROP INDEX IF EXISTS runs_config;
CREATE INDEX runs_measured ON runs (study, measured) WHERE measured IS NOT NULL;
CREATE INDEX events_alarm ON events (study) WHERE kind = 'alarm';
CREATE INDEX events_configured ON events (study) WHERE kind = 'study configured';
CREATE INDEX events_agents ON events (study) WHERE kind IN ('agent asked', 'agent answered');
CREATE TABLE configs (hash TEXT PRIMARY KEY, body TEXT NOT NULL);
""",
    3: """
ALTER TABLE studies RENAME COLUMN docket TO judge_state;
""",
    4: PIPELINES,
    5: TOTALS,
    6: """
ALTER TABLE runs ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;
ALTER TABLE runs ADD COLUMN host TEXT;
ALTER TABLE runs ADD COLUMN job TEXT;
ALTER TABLE runs ADD COLUMN lost_s REAL NOT NULL DEFAULT 0;
CREATE INDEX runs_retried ON runs (study) WHERE attempt > 1;
""",
    7: LONG_QUEUES,
    8: RARE_EVENTS,
}
"""SQL that upgrades the tables of a version to the next."""
