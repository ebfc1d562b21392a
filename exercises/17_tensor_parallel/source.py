"""Two matrices, one sum (40 minutes)

A block of a transformer: y = relu(x @ up + up_bias) @ down + down_bias. Ranks share the matrices,
and all of them have the same x. The first matrix is cut by columns, so that each rank computes some
of the features in between, and the second by rows, so that these features are all that a rank
needs. What it gets is one term of y: an all-reduce adds the terms of all ranks.

                   x [tokens, width], on every rank
    up, up_bias    this rank's columns: [width, inner / world_size] and [inner / world_size]
    relu           of this rank's features
    down           this rank's rows: [inner / world_size, width]
    sum            of the terms of all ranks; then down_bias, once
                   y [tokens, width], on every rank

Backward goes the other way: dy is the same on every rank, and from it each computes the gradients
of its own parts. What it knows of dx is one term again.

    comm.all_reduce(tensor)    the sum over the ranks, in place

Of a product z = x @ w, the gradients are dw = x.T @ dz and dx = dz @ w.T, and that of a bias is the
sum of dz over the tokens. docs/learn/19-two-matrices-one-sum.md says what this costs.
"""

import torch


class TwoMatrices:
    """One rank's part of the block. After ``backward``, ``gradients`` is a list: of this rank's
    up, up_bias and down, and of down_bias."""

    def __init__(self, comm, up, up_bias, down, down_bias):
        """Every rank is given the whole matrices and biases, and keeps copies of its parts."""
        self.comm = comm
        #: solution
        size = len(up_bias) // comm.world_size
        mine = slice(comm.rank * size, (comm.rank + 1) * size)
        self.up, self.up_bias = up[:, mine].clone(), up_bias[mine].clone()
        self.down, self.down_bias = down[mine].clone(), down_bias.clone()
        #: instead
        #| raise NotImplementedError("keep this rank's parts, and nothing else of the matrices")
        #: end

    def forward(self, x):
        """y, the same on every rank."""
        #: solution
        self.x = x
        self.features = torch.relu(x @ self.up + self.up_bias)
        y = self.features @ self.down
        self.comm.all_reduce(y)
        return y + self.down_bias
        #: instead
        #| raise NotImplementedError("features of this rank, its term of y, the sum, down_bias")
        #: end

    def backward(self, dy):
        """dx, the same on every rank. ``dy`` is as well, and stays as it is."""
        #: solution
        inner = dy @ self.down.T * (self.features > 0)
        self.gradients = [self.x.T @ inner, inner.sum(0), self.features.T @ dy, dy.sum(0)]
        dx = inner @ self.up.T
        self.comm.all_reduce(dx)
        return dx
        #: instead
        #| raise NotImplementedError("self.gradients, and dx, which is a sum of terms again")
        #: end


#: hint
#| `up[:, mine]` are columns, `down[mine]` rows; `mine` is the same slice for both, and for
#| `up_bias`. Clone them: a view keeps the whole matrix in memory.
#: hint
#| The last bias is added by every rank. In front of the sum it would count world_size times.
#: hint
#| Gradients of matrices are of this rank's parts, for which all tokens were here: they are
#| complete. dx went through the features of all ranks, so it is the one that needs a sum.
#: end
