"""A model with an LSTM, whose backward is oneDNN's, trains with the defaults."""

import torch

import dpcore as dp


def gradients(comm, mode):
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(512, 512, 2, batch_first=True)
    model = dp.DataParallel(lstm, comm=comm, gradients=mode)
    inputs = torch.randn(2, 4, 512)
    for _ in range(8):
        lstm.zero_grad()
        model(inputs)[0].sum().backward()
    assert ("4 born in place" in str(model.bucket_report())) == (mode is None)
    return [parameter.grad.tolist() for parameter in lstm.parameters()]


def both(comm):
    return gradients(comm, None) == gradients(comm, "copied")


def test_gradients_of_an_lstm_are_made_in_their_buckets():
    """oneDNN frees null pointers, which once ended leases that there were not."""
    assert dp.spawn(both, 2) == [True, True]
