// The twin of `makespan` in planning/order/pipeline_times.py, where everything is explained: the same sums in the same
// order.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace {

using Numbers = std::vector<int>;
using Figures = std::vector<double>;
using ByRank = std::vector<Figures>;

class PipelineTimes {
 public:
  PipelineTimes(ByRank forward, ByRank backward, ByRank down, ByRank up)
      : forward_(std::move(forward)), backward_(std::move(backward)), down_(std::move(down)), up_(std::move(up)) {}

  double makespan(const std::vector<Numbers>& orders) const {
    const int last = static_cast<int>(orders.size()) - 1;
    const std::size_t units = forward_.at(0).size();
    State state{ByRank(orders.size(), Figures(units, -1.0)), ByRank(orders.size(), Figures(units, -1.0)),
                Figures(orders.size(), 0.0), Figures(orders.size(), 0.0), Figures(orders.size(), 0.0),
                std::vector<std::size_t>(orders.size(), 0)};
    state.inputs.front().assign(units, 0.0);
    state.gradients.back().assign(units, 0.0);
    for (bool ran = true; ran;) {
      ran = false;
      for (int rank = 0; rank <= last; ++rank) ran = run(state, orders[rank], rank, last) || ran;
      for (int rank = last; rank >= 0; --rank) ran = run(state, orders[rank], rank, last) || ran;
    }
    return *std::max_element(state.now.begin(), state.now.end());
  }

 private:
  struct State {
    ByRank inputs, gradients;
    Figures links_down, links_up, now;
    std::vector<std::size_t> done;
  };

  bool run(State& state, const Numbers& order, int rank, int last) const {
    const std::size_t begun = state.done[rank];
    std::size_t place = begun;
    double time = state.now[rank];
    for (; place < order.size(); ++place) {
      const bool forward = order[place] >= 0;
      const int unit = forward ? order[place] : ~order[place];
      const double ready = (forward ? state.inputs : state.gradients)[rank][unit];
      if (ready < 0.0) break;
      time = std::max(ready, time) + (forward ? forward_ : backward_)[rank][unit];
      if (forward && rank < last) {
        double& link = state.links_down[rank];
        link = std::max(time, link) + (down_.empty() ? 0.0 : down_[rank][unit]);
        state.inputs[rank + 1][unit] = link;
      } else if (!forward && rank > 0) {
        double& link = state.links_up[rank];
        link = std::max(time, link) + (up_.empty() ? 0.0 : up_[rank - 1][unit]);
        state.gradients[rank - 1][unit] = link;
      }
    }
    state.done[rank] = place;
    state.now[rank] = time;
    return place > begun;
  }

  const ByRank forward_, backward_, down_, up_;
};

}  // namespace

namespace helixpipe {

void bind_pipeline_times(pybind11::module_& module) {
  pybind11::class_<PipelineTimes>(module, "PipelineTimes")
      .def(pybind11::init<ByRank, ByRank, ByRank, ByRank>())
      .def("makespan", &PipelineTimes::makespan);
}

}  // namespace helixpipe
