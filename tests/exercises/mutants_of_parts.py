"""Mutants of the exercises about sequences and matrices that ranks share."""

TEXT = """
== ring_attention | * the mean of two blocks | join | elements are wrong
--
    return out * mine[:, None] + more * its[:, None], both
++
    return (out + more) / 2, both

== ring_attention | exponentials that overflow | large | not a number
--
    both = torch.logaddexp(lse, its_lse)
++
    both = (lse.exp() + its_lse.exp()).log()

== ring_attention | forgets the last block | values | elements are wrong
--
    for _ in range(comm.world_size - 1):
++
    for _ in range(comm.world_size - 2):

== ring_attention | * sends its own in each step | values | elements are wrong
--
        k, v = came
        out, lse = join(out, lse, *block(q, k, v))
++
        out, lse = join(out, lse, *block(q, *came))

== ring_attention | the share of the other block | join | elements are wrong
--
    mine, its = (lse - both).exp(), (its_lse - both).exp()
++
    its, mine = (lse - both).exp(), (its_lse - both).exp()

== ring_attention | all keys first, and one softmax | as_they_come | joins 0 times
--
        k, v = came
        out, lse = join(out, lse, *block(q, k, v))
    return out
++
        k, v = came
        kept += [came]
    keys, values = (torch.cat(parts) for parts in zip(*kept))
    return block(q, keys, values)[0]
--
    out, lse = block(q, k, v)
++
    kept = [(k, v)]

== ring_attention | goes to the left | neighbours | and not
--
    right = (comm.rank + 1) % comm.world_size
    left = (comm.rank - 1) % comm.world_size
++
    left = (comm.rank + 1) % comm.world_size
    right = (comm.rank - 1) % comm.world_size

== ring_attention | queries travel as well | bytes | are enough and needed
--
        works = [comm.send(tensor, right, async_op=True) for tensor in (k, v)]
++
        works = [comm.send(tensor, right, async_op=True) for tensor in (k, v, q)]
--
            comm.recv(tensor, left)
++
            comm.recv(tensor, left)
        comm.recv(torch.empty_like(q), left)

== ring_attention | receives into its arguments | untouched | receive into tensors of your own
--
        came = torch.empty_like(k), torch.empty_like(v)
        works = [comm.send(tensor, right, async_op=True) for tensor in (k, v)]
++
        came = k, v
        works = [comm.send(tensor.clone(), right, async_op=True) for tensor in (k, v)]

== ring_attention | a gather | values | comm.all_gather is not part of this exercise
--
    out, lse = block(q, k, v)
++
    comm.all_gather(torch.empty(len(k) * comm.world_size, k.shape[1], dtype=k.dtype), k)
    out, lse = block(q, k, v)

== ring_attention | somebody else's ring | values | dpcore.parallel.attention is closed
--
    out, lse = block(q, k, v)
++
    from dpcore.parallel.attention import ring_attention as known

    return known(q[None, None], k[None, None], v[None, None], comm=comm)[0, 0]
    out, lse = block(q, k, v)

== tensor_parallel | * adds the bias in front of the sum | forward | they are too large by down_bias
--
        y = self.features @ self.down
        self.comm.all_reduce(y)
        return y + self.down_bias
++
        y = self.features @ self.down + self.down_bias
        self.comm.all_reduce(y)
        return y

== tensor_parallel | no sum in forward | forward | they are this rank's term
--
        self.comm.all_reduce(y)
++

== tensor_parallel | a mean | forward | the mean of the ranks' terms
--
        self.comm.all_reduce(y)
++
        self.comm.all_reduce(y, "mean")

== tensor_parallel | * no sum in backward | dx | still this rank's own
--
        self.comm.all_reduce(dx)
++

== tensor_parallel | views of whole matrices | parts | a view keeps what it is a view of
--
        self.up, self.up_bias = up[:, mine].clone(), up_bias[mine].clone()
        self.down, self.down_bias = down[mine].clone(), down_bias.clone()
++
        self.up, self.up_bias = up[:, mine], up_bias[mine]
        self.down, self.down_bias = down[mine], down_bias

== tensor_parallel | gathers features | one_sum | is enough and needed
--
        y = self.features @ self.down
        self.comm.all_reduce(y)
++
        y = self.features @ self.down
        self.comm.all_reduce(y)
        self.comm.all_reduce(self.features.clone())

== tensor_parallel | sums the gradients of its parts | gradients | sums over ranks, whose parts
--
        dx = inner @ self.up.T
++
        for gradient in self.gradients:
            self.comm.all_reduce(gradient)
        dx = inner @ self.up.T

== tensor_parallel | sums dx in two calls | one_sum_back | is enough and needed
--
        self.comm.all_reduce(dx)
++
        for half in dx.chunk(2):
            self.comm.all_reduce(half)

== tensor_parallel | forgets the relu in backward | gradients | elements are wrong
--
        inner = dy @ self.down.T * (self.features > 0)
++
        inner = dy @ self.down.T

== tensor_parallel | sums dy | dy | has changed dy
--
        inner = dy @ self.down.T * (self.features > 0)
++
        self.comm.all_reduce(dy, "mean")
        dy.add_(0.5)
        inner = dy @ self.down.T * (self.features > 0)

== tensor_parallel | somebody else's layers | forward | dpcore.reference.tensor_parallel is closed
--
        self.x = x
++
        from dpcore.reference.tensor_parallel import ColumnParallel

        self.x = x
"""
