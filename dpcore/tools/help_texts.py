"""What ``dpcore`` alone and ``dpcore COMMAND --help`` say; the page of ``compare`` is its own."""

from __future__ import annotations

from dpcore._version import __version__

DOORS = """\
Collective communication and data parallel training that you can read and see.

I train
  doctor     what this machine has, what is missing, what to do about it
  inspect    what a rank is doing that runs or hangs, and which one holds it up
  chaos      what deaths of ranks cost a training under dp.elastic
I study overlap
  show       a page, a picture and tables of a trace, also of torch's profiler
  advise     what to change in a run of torch DDP or dpcore, in order of gain
  simulate   a prediction of a step over another link, with another schedule
I teach or learn
  exercise   write all-reduce and DDP yourself; `show ring` steps through one
I compare
  demo       torch DDP and dpcore train a model: which wins, and why
  compare    the same for your model, or libraries with a collective
  bench      times of dpcore's collectives on this machine
  calibrate  what this machine and its network cost, for auto and for simulate
"""

BENCH = """\
examples:
  dpcore bench                                         all_reduce on 2 ranks, 8 B to 16 MiB
  dpcore bench --world 2,4 --sizes 1K:16M:4x --algorithm auto,ring,two_shot
  dpcore bench --world 2,4 --algorithm auto,ring,mine.py:swing     with moves of your own
  dpcore bench --collective all_gather,reduce_scatter --dtype bfloat16 --plain
  dpcore bench --json | jq .busbw
  torchrun --nproc-per-node 4 -m dpcore bench          on the ranks that a launcher started
  dpcore bench --reproduce                             which of README's claims hold here

The columns are those of nccl-tests: size is the larger side of the operation, algbw = size / time,
busbw = algbw times the share of the bytes that must cross every rank's link (for all_reduce
2(n-1)/n). The time is that of the slowest rank, #wrong the elements that differ from the result
that is known in advance, over all ranks. The exit status is 1 when there are any.
"""

CALIBRATE = """\
examples:
  dpcore calibrate                                     memory, loopback and processors: 10 seconds
  dpcore calibrate --file big-machine.json             for dpcore simulate --calibration
  torchrun --nnodes 2 ... -m dpcore calibrate          the network between two hosts, once for each
  dpcore calibrate --json | jq .operation

In seconds: memory, loopback and network are a step, a message and a byte between two ranks;
operation is a small operation with nothing to wait for, memory_operation one in shared memory;
wake is what a sleeping thread takes to run; the bytes are copied, added, added and written to a
peer, and given to the kernel by two ranks at once. after_pause is what a message of a MiB takes
longer when the connection was silent before. Without a file in the cache, auto chooses by
defaults. Close other programs first: all are the best quarter of many tries, but a machine that is
never idle has no good quarter.
"""

CHAOS = """\
examples:
  dpcore chaos                                  a small model on 4 ranks, 10 faults, half a minute
  dpcore chaos --mtbf 20 --seed 7 --faults 100 -- python train.py
  dpcore chaos --kinds kill,pair --restart 3 -- torchrun --nproc-per-node 1 train.py
  dpcore chaos --hosts 2 --kinds kill,stop,cut,slow
  dpcore chaos --json | jq .kill_to_step

The command is started once per rank, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and
DPCORE_DOOR, which dp.elastic takes for its door=. A rank that is killed is started again with
DPCORE_JOIN=1, with which dp.init() joins the job. Steps are those that dp.elastic has finished.
"kill to next step" ends when ranks without the killed one have finished a step, and goodput is the
share of the time that was not between a fault and that step, beyond one median step. At least two
ranks go on training; a fault that would leave fewer comes later. The exit status is 1 if a step
did not come, a rank ended with an error, or, without a command, if weights differ from those of a
run in one process in which the same ranks take each step.
"""

INSPECT = """\
examples:
  dpcore inspect --job                          which rank holds up the job, on any host
  dpcore inspect --job 4711                     the same of the job of process 4711 only
  dpcore inspect                                what each rank of this host does, or did last
  dpcore inspect 4711                           the rank in process 4711
  dpcore inspect --json 4711 | jq .in_flight
  dpcore inspect --job --flight-recorder dump   for torchfrtrace, which is torch's

The process is not stopped, asked or slowed down: its black box lies in memory that can be read
from outside, also while it hangs. What ranks of other hosts do is known to those of this one, so
--job sends no messages and opens no connection. It sees what this user may see of /proc: run it as
root, or as the user of the job. A line of the program is at most a second or two old.
"""

SHOW = """\
examples:
  dpcore show run.json                          writes run.html, prints the figures
  dpcore show --open run.json                   and opens the page
  dpcore show bucketed.json sequential.json     two runs, one below the other, step by step
  dpcore show run.json --png run.png --steps 3:5
  dpcore show --json run.json | jq '.[0].overlap, .[0].exposed_ms_per_step'
  dpcore show log/*.pt.trace.json               torch DDP: what torch.profiler wrote, all ranks
  dpcore show before/ after/                    two such folders under each other
  dpcore show --csv buckets.csv run.json        a row per run, step, rank and bucket
  dpcore show --export kineto run.json          run.kineto/, for Holistic Trace Analysis
  dpcore show --export flight-recorder run.json run.flight-recorder/, for torch's analyser
  dpcore show ring --open                       steps through an algorithm; needs no trace
  dpcore show bruck --collective all_to_all --world 5
  dpcore show mine.py:swing --world 8           an algorithm of your own: world -> moves
  dpcore show ring --world 64 --sizes 4M --export chakra   ring.chakra/, for ASTRA-sim
  dpcore show plan.xml                          a plan of MSCCLang, or mscclpp's plan.json, proved

The file is written by `with dpcore.trace("run.json"):` around the steps of interest. Files of
torch.profiler (tensorboard_trace_handler, export_chrome_trace; compressed or not; Gloo, or NCCL)
hold a rank each: those of one folder are one run, and a folder stands for its files; other JSON
in it is passed over. The page is
one file without any other; it needs neither dpcore nor a network to be looked at. In the JSON,
names that end with _per_step are of a step; exposed_ms and communication_ms are of the whole trace.

columns of --csv:
  run              name of the run
  step             number of the step in the trace, from 1; empty before the first
  rank             rank
  bucket           number of the bucket, or of the fragment, in the step; 0 is sent first
  model            name of the model, where the run has several
  bytes            size of the bucket; empty where the trace does not say
  schedule         launch schedule of the model
  cap_mb           bucket cap in MiB that applied to this bucket; empty for none
  link             words of an emulated link, empty for the real one
  transport        what carried the bytes: shm, tcp, gloo, nccl, ...
  world            number of ranks
  commit           commit of the program that was traced, where it ran in a git working tree
  begin_ms         from the beginning of the step to the bucket's first gradient
  filling_ms       from its first gradient to its last
  not_sent_ms      from its last gradient to its launch
  in_flight_ms     from its launch to its completion
  exposed_ms       time the program waited while this bucket was the first one in flight
  step_ms          length of the step
  step_exposed_ms  exposed time of the whole step
  parameters       the first parameters in the bucket
  phase            reduce_scatter or all_gather, where a bucket has several phases
"""

ADVISE = """\
examples:
  dpcore advise log/*.pt.trace.json             torch DDP: what torch.profiler wrote, all ranks
  dpcore advise log                             the same, by their folder
  dpcore advise run.json                        a run that dpcore.trace recorded
  dpcore advise log --expect 10gbit             with what the network should carry
  dpcore advise my.py:make --world 2            records steps of a model, as dpcore compare takes it
  dpcore advise my.py:make --stack torch,dpcore
  dpcore advise --json log | jq '.[0].findings[0].change'

The first line names the cause with most to gain, or says "Nothing to gain here." Each finding says
what was seen, what a step may gain, and the line to change. A gain is a bound, the most that can be
gained, unless it says that the simulator gave it. Record several steps on every rank, with
record_shapes=True, which tells how large buckets and batches are. "Could be tried" changes what is
computed or how the program is written; nothing is wrong without it.

causes: straggler, unequal batches, data loading, oversubscribed threads, tiny buckets, one giant
bucket, first bucket late, gradients at the end, unused parameters searched, copies out of buckets,
slow link, latency, bytes, GPU-CPU synchronisation, CPU governor, optimizer, schedule, exposed
sends.
"""

DOCTOR = """\
examples:
  dpcore doctor
  dpcore doctor --json | jq '.findings[] | select(.state != "ok")'

The exit status is 1 when dpcore does not work here; what is missing for something optional is no
reason for that. Two ranks are started and checked, for a few seconds.
"""

SIMULATE = """\
examples:
  dpcore simulate run.json --link 1gbit,50us
  dpcore simulate run.json --link 10gbit,1gbit --world 2,8 --algorithm two_shot,ring
  dpcore simulate run.json --link 1gbit,50us --schedule bucketed:1,bucketed:5,bucketed:25
  dpcore simulate run.json --link 1gbit,50us --schedule bucketed:4,mine.py:MySchedule:4
  dpcore simulate run.json --link 1gbit,50us --schedule dear,local:16    local: LocalSGD
  dpcore simulate local.json --link 1gbit,50us --schedule local,local:64    of a trace of LocalSGD
  dpcore simulate run.json --link 1gbit,50us --straggler exponential:0.1 --hook 0.5
  dpcore simulate gradients.json --link 100mbit,1ms --json
  dpcore simulate run.json --link 10gbit,20us --world 64 --best      what to choose there
  dpcore simulate run.json --link 10gbit,20us --until 0.9            how many ranks still pay
  dpcore simulate run.json --link 10gbit,20us --html step.html       against bandwidth, ranks, size
  dpcore simulate run.json --link 10gbit,20us --schedule dear --page dear.html   as of a run
  dpcore simulate run.json --link 1gbit --measured compare/my/compare.jsonl --csv errors.csv
  dpcore simulate run.json --intra 50gbit,2us --inter 1gbit,50us --ranks-per-host 8 --world 16

The file is a trace of dpcore.trace around steps of a DataParallel, over any link, or a description,
see dpcore.tools.simulate.gradients_of; files and folders of torch.profiler are read as by dpcore
show, over NCCL with a gradient for each bucket. What a file does not say is said. From a trace come
the times at which gradients get ready, each the least of all steps, so that a disturbed step
disturbs no prediction, and the bucket cap. Jitter and loss of a link are drawn as in a run, and one
step is no average over them. A step is forward, backward and communication, which
costs processors only with --calibration: see dpcore calibrate. mine.py:MySchedule is a
dpcore.LaunchSchedule of your own; oracle is computing without communication.
"""

BEGIN = f"""\
dpcore {__version__}: collective communication and data parallel training that you can read and see.

Where to begin:
  what it is for        dpcore demo       a model is trained by torch DDP and by dpcore, in turns
                        dpcore compare my.py:make
                                          the same for a model of your own
  see a run of torch    dpcore show log/*.pt.trace.json
                                          what torch.profiler wrote, of all ranks
                        dpcore advise log/*.pt.trace.json
                                          why it is slow, and what to change
  see a training run    change one import of a script for torch DDP,
                            from dpcore import DistributedDataParallel
                        and let it write what each rank did and waited for:
                            DPCORE_TRACE=run.json torchrun --nproc-per-node 2 train.py
                            dpcore show --open run.json
  over another network  DPCORE_LINK=1gbit,50us in front of the same command, or a prediction:
                            dpcore simulate run.json --link 1gbit,50us
  this machine          dpcore doctor     what it has, what is missing, what to do about it
                        dpcore bench      all-reduce on two ranks, from 8 B to 16 MiB
  a job that hangs      dpcore inspect --job
  how it works inside   dpcore exercise   write all-reduce and DDP yourself, and have them checked

`dpcore --help` lists the commands, `dpcore COMMAND --help` has examples of each.
"""
