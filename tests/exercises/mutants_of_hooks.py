"""More of the exercises about gradients, without buckets; mutants.py says how to read it."""

TEXT = """
== naive_ddp | averages, then divides | gradients | averaged twice
--
                self.comm.all_reduce(parameter.grad, "mean")
++
                self.comm.all_reduce(parameter.grad, "mean")
                parameter.grad /= self.comm.world_size

== naive_ddp | two ranks only | gradients | times the right ones
--
                self.comm.all_reduce(parameter.grad, "mean")
++
                self.comm.all_reduce(parameter.grad)
                parameter.grad /= 2

== naive_ddp | averages parameters | gradients | still this rank's own
~ all_reduce(parameter.grad, => all_reduce(parameter.data,

== naive_ddp | averages a copy | gradients | still this rank's own
~ all_reduce(parameter.grad, => all_reduce(parameter.grad.clone(),

== naive_ddp | begins with a copy of rank 0's values | begin | still this rank's own
~ comm.broadcast(tensor.data, 0) => comm.broadcast(tensor.data.clone(), 0)

== naive_ddp | every rank is a root | begin | raised Mismatch
~ comm.broadcast(tensor.data, 0) => comm.broadcast(tensor.data, comm.rank)

== naive_ddp | the last rank is the root | begin | elements are wrong
~ comm.broadcast(tensor.data, 0) => comm.broadcast(tensor.data, comm.world_size - 1)

== naive_ddp | * begins and never waits | gradients | not a number
~ all_reduce(parameter.grad, "mean") => all_reduce(parameter.grad, "mean", async_op=True)

== naive_ddp | waits for the last one only | gradients | not a number
--
                self.comm.all_reduce(parameter.grad, "mean")
++
                work = self.comm.all_reduce(parameter.grad, "mean", async_op=True)
        work.wait()

== naive_ddp | forgets the last parameter | gradients | still this rank's own
~ in self.module.parameters(): => in list(self.module.parameters())[:-2]:

== naive_ddp | in single precision | gradients | was a type of 32 bits
--
                self.comm.all_reduce(parameter.grad, "mean")
++
                gradient = parameter.grad.float()
                self.comm.all_reduce(gradient, "mean")
                parameter.grad.copy_(gradient)

== naive_ddp | rank 0 keeps out of it | begin | raised Mismatch
--
            if parameter.requires_grad:
++
            if parameter.requires_grad and self.comm.rank:

== naive_ddp | hands out values in each step | operations | step 1
--
        for parameter in self.module.parameters():
++
        for tensor in self.module.buffers():
            self.comm.broadcast(tensor.data, 0)
        for parameter in self.module.parameters():

== naive_ddp | trains a copy | gradients | first.weight has none
--
        self.module, self.comm = module, comm
++
        import copy
        self.module, self.comm = copy.deepcopy(module), comm

== flat_ddp | averages, then divides | gradients | averaged twice
--
        self.comm.all_reduce(flat, "mean")
++
        self.comm.all_reduce(flat.div_(self.comm.world_size), "mean")

== flat_ddp | sums | gradients | they are the sums over 3 ranks
~ all_reduce(flat, "mean") => all_reduce(flat)

== flat_ddp | two ranks only | gradients | times the right ones
--
        self.comm.all_reduce(flat, "mean")
++
        self.comm.all_reduce(flat)
        flat /= 2

== flat_ddp | single precision | gradients | was a type of 32 bits
~ gradients[0].new_empty( => __import__("torch").empty(

== flat_ddp | brings back to the wrong names | gradients | still this rank's own
--
            gradient.copy_(part.view_as(gradient))
++
            gradient = part.view_as(gradient)

== flat_ddp | the parts in another order | gradients | in reverse order
--
            gradient.copy_(part.view_as(gradient))
++
            gradient.copy_(part.flip(0).view_as(gradient))

== flat_ddp | transposes | gradients | the wrong places
~ part.copy_(gradient.flatten()) => part.copy_(gradient.T.flatten())

== flat_ddp | begins and never waits | gradients | not a number
~ all_reduce(flat, "mean") => all_reduce(flat, "mean", async_op=True)

== flat_ddp | waits after it has copied | gradients | not a number
--
            gradient.copy_(part.view_as(gradient))
++
            gradient.copy_(part.view_as(gradient))
        work.wait()
--
        self.comm.all_reduce(flat, "mean")
++
        work = self.comm.all_reduce(flat, "mean", async_op=True)

== flat_ddp | two halves | operations | step 1
--
        self.comm.all_reduce(flat, "mean")
++
        for half in flat.chunk(2):
            self.comm.all_reduce(half, "mean")

== flat_ddp | fills the flat tensor once | gradients | those of step 1
--
        flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
        parts = flat.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.flatten())
++
        if not hasattr(self, "flat"):
            self.flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
            parts = self.flat.split([gradient.numel() for gradient in gradients])
            for part, gradient in zip(parts, gradients, strict=True):
                part.copy_(gradient.flatten())
        flat = self.flat
        parts = flat.split([gradient.numel() for gradient in gradients])

== flat_ddp | more room than there is | bytes | step 1
--
gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
++
gradients[0].new_zeros(512)
--
parts = flat.split([gradient.numel() for gradient in gradients])
++
sizes = [g.numel() for g in gradients]; parts = flat[: sum(sizes)].split(sizes)

== flat_ddp | averages parameters | gradients | still this rank's own
~ [p.grad for p in => [p.data for p in

== per_parameter_ddp | * waits for the operation before | no_wait | is held up by wait
--
        self.works.append(work)
++
        if self.works:
            self.works[-1].wait()
        self.works.append(work)

== per_parameter_ddp | has at most two in flight | no_wait | is held up by wait
--
        self.works.append(work)
++
        self.works.append(work)
        if len(self.works) > 2:
            self.works.pop(0).wait()

== per_parameter_ddp | never clears | kept | has 12 items after step 2
~         self.works.clear() =>

== per_parameter_ddp | keeps all works for later | kept | has 12 items after step 2
--
        self.works.append(work)
++
        self.works.append(work)
        self.all = [*getattr(self, "all", []), work]

== per_parameter_ddp | waits for the last one only | gradients | not a number
--
        for work in self.works:
            work.wait()
++
        self.works[-1].wait()

== per_parameter_ddp | waits for each other one | gradients | not a number
--
            work.wait()
        self.works.clear()
++
            work.wait()
            self.works.remove(work)
        self.works.clear()

== per_parameter_ddp | waits in the next step | gradients | not a number
--
        for work in self.works:
            work.wait()
        self.works.clear()
++
        pass
--
        return self.module(*inputs)
++
        for work in self.works:
            work.wait()
        self.works.clear()
        return self.module(*inputs)

== per_parameter_ddp | hooks in each step | operations | step 2
--
        return self.module(*inputs)
++
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        return self.module(*inputs)
--
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
++

== per_parameter_ddp | every hook means the last parameter | gradients | still this rank's own
--
register_post_accumulate_grad_hook(self.gradient_ready)
++
register_post_accumulate_grad_hook(lambda _: self.gradient_ready(parameter))

== per_parameter_ddp | divides what is in flight | gradients | they are the sums over 3 ranks
--
        work = self.comm.all_reduce(parameter.grad, "mean", async_op=True)
++
        work = self.comm.all_reduce(parameter.grad, "sum", async_op=True)
        parameter.grad /= self.comm.world_size

== per_parameter_ddp | clips what is in flight | waits | was changed before wait()
--
        self.works.append(work)
++
        self.works.append(work)
        parameter.grad.nan_to_num_(0.0).clamp_(-1, 1)

== per_parameter_ddp | averages, then divides | gradients | averaged twice
--
            work.wait()
++
            work.wait()
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad /= self.comm.world_size

== per_parameter_ddp | a barrier in the hook | operations | step 1
~         self.works.append(work) =>         self.works.append(work); self.comm.barrier()

== per_parameter_ddp | sums | gradients | they are the sums over 3 ranks
~ "mean", async_op=True => "sum", async_op=True

== no_sync | the error does not get out | error | swallows the error
--
        finally:
            self.is_synchronised = before
++
        except Exception:
            pass
        self.is_synchronised = before

== no_sync | an error switches on | nested | operations within the outer block
--
        finally:
            self.is_synchronised = before
++
        except Exception:
            self.is_synchronised = True
            raise
        self.is_synchronised = before

== no_sync | a depth that errors do not undo | error | operations, and not 6
~ self.is_synchronised = True => self.is_synchronised, self.depth = True, 0
~         before, self.is_synchronised = self.is_synchronised, False =>         self.depth += 1
--
        try:
            yield
        finally:
            self.is_synchronised = before
++
        yield
        self.depth -= 1
~         if self.is_synchronised: =>         if not self.depth:

== no_sync | switches over instead of off | nested | operations within the outer block
~ self.is_synchronised = before => self.is_synchronised = not self.is_synchronised
--
before, self.is_synchronised = self.is_synchronised, False
++
self.is_synchronised = not self.is_synchronised

== no_sync | turned round | silent | operations within no_sync
~         if self.is_synchronised: =>         if not self.is_synchronised:

== no_sync | averages at the end of the block | silent | operations within no_sync
--
            self.is_synchronised = before
++
            self.is_synchronised = before
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.grad is not None:
                    self.comm.all_reduce(parameter.grad, "mean")

== no_sync | begins within the block and waits | silent | operations within no_sync
--
        if self.is_synchronised:
            self.works.append(self.comm.all_reduce(parameter.grad, "mean", async_op=True))
++
        work = self.comm.all_reduce(parameter.grad, "mean", async_op=True)
        self.works.append(work)
        if not self.is_synchronised:
            self.finish()

== no_sync | forgets the gradients of the block | gradients | step 1
--
            self.is_synchronised = before
++
            self.is_synchronised = before
            for parameter in self.module.parameters():
                parameter.grad = None

== no_sync | sums | gradients | they are the sums over 2 ranks
--
all_reduce(parameter.grad, "mean", async_op=True)
++
all_reduce(parameter.grad, "sum", async_op=True)

== no_sync | a hook that blocks | no_wait | is held up by all_reduce
--
self.works.append(self.comm.all_reduce(parameter.grad, "mean", async_op=True))
++
self.comm.all_reduce(parameter.grad, "mean")

== no_sync | a hook that waits for the one before | no_wait | is held up by wait
--
            self.works.append(self.comm
++
            if self.works:
                self.works[-1].wait()
            self.works.append(self.comm

== no_sync | sends matrices only | once | operations after the block
~         if self.is_synchronised: =>         if self.is_synchronised and parameter.dim() > 1:

== no_sync | never clears | kept | has 12 items after step 2
~         self.works.clear() =>
"""
