#!/bin/sh
# What mpiexec takes for ssh: agent.sh [OPTION...] ADDRESS COMMAND... runs the command in the network
# namespace of that address, under a host name of its own: by the name MPI tells hosts apart.
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
for known in $BENCH_HOSTS; do
  if [ "${known%%=*}" = "$address" ]; then
    name=${known#*=}
    exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"
  fi
done
echo "agent.sh: no host has the address $address" >&2
exit 1
