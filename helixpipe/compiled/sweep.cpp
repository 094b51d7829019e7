#include <algorithm>
#include <utility>

#include "core.h"

namespace helixpipe {

namespace {

// A rank's buffers are marked with a number of its own, so that one table serves all ranks.
class Sweep {
 public:
  Sweep(const Graph& graph, const Categories& categories, const Figures& sizes, const Numbers& size_of,
        const Figures& workspaces, const Numbers& workspace_of)
      : graph_(graph),
        tables_(graph.tables()),
        categories_(categories),
        sizes_(sizes),
        size_of_(size_of),
        workspaces_(workspaces),
        workspace_of_(workspace_of),
        holder_(graph.buffers.size(), -1),
        category_(graph.buffers.size(), 0),
        part_(graph.buffers.size(), 0.0) {}

  Peak run(int rank, const std::vector<char>& actions, const Numbers& tasks) {
    rank_ = rank;
    now_.assign(categories_.count, 0.0);
    peak_ = {0.0, 0.0, 0.0, now_};
    total_ = host_ = received_ = received_then_ = 0.0;
    for (std::size_t at = 0; at < tasks.size(); ++at) {
      const int task = tasks[at];
      if (task >= graph_.num_ops()) {
        transfer(static_cast<Action>(actions[at]), task);
      } else if (actions[at] == kRun) {
        op(task);
      } else {  // free
        free_all(task);
      }
    }
    peak_.most[categories_.messages] += peak_.received - received_then_;
    return peak_;
  }

 private:
  void op(int task) {
    const char kind = graph_.index().kind[task];
    Numbers& given = given_;
    given.clear();
    if (kind == kForward && graph_.takes[task] >= 0) {
      const double part = part_of(graph_.takes[task]);
      free(graph_.takes[task]);
      keep_part(part, task, tables_.saved, tables_.offloaded);
    }
    for (const int* at = graph_.writes.begin(task); at != graph_.writes.end(task); ++at) {
      if (categories_.given[graph_.buffers[*at].kind]) {
        given.push_back(*at);
      } else {
        take(*at);
      }
    }
    now_[categories_.workspace] = workspaces_[workspace_of_[task]];
    check();
    now_[categories_.workspace] = 0.0;
    const double part = kind == kInput && graph_.takes[task] >= 0 ? part_of(graph_.takes[task]) : 0.0;
    if (kind == kInput) leave_to_weight(task);
    const bool inside = graph_.recomputes[task];
    for (const int* at = graph_.frees.begin(task); at != graph_.frees.end(task); ++at) {
      const int what = graph_.buffers[*at].kind;
      if (categories_.taken[what] || (inside && what == tables_.recomputed)) free(*at);
    }
    keep_part(part, task, tables_.deferred, tables_.deferred);
    for (const int number : given) take(number);
    check();
  }

  double part_of(int number) const { return holder_[number] == rank_ ? part_[number] : 0.0; }

  // What an op has received is from then on in the first of these buffers of its that can hold it.
  void keep_part(double part, int task, int one, int other) {
    if (part == 0.0) return;
    for (const int* at = graph_.writes.begin(task); at != graph_.writes.end(task); ++at) {
      const Buffer& buffer = graph_.buffers[*at];
      if ((buffer.kind == one || buffer.kind == other) && !buffer.host && sizes_[size_of_[*at]] >= part) {
        receive(*at, part);
        break;
      }
    }
  }

  void receive(int number, double size) {
    part_[number] = size;
    received_ += size;
    peak_.received = std::max(peak_.received, received_);
  }

  void leave_to_weight(int task) {
    for (const int* at = graph_.frees.begin(task); at != graph_.frees.end(task); ++at) {
      const int what = graph_.buffers[*at].kind;
      if (what == tables_.saved || what == tables_.recomputed || what == tables_.fetched) free(*at);
    }
    Numbers others;
    for (const int number : given_) {
      if (graph_.buffers[number].kind == tables_.deferred) {
        take(number);
      } else {
        others.push_back(number);
      }
    }
    given_ = others;
    check();
  }

  void transfer(Action action, int task) {
    const int* begin = graph_.writes.begin(task);
    const int* end = graph_.writes.end(task);
    const bool link = graph_.row(task).resource == kLink;
    if (action == kReceive) {
      const bool pooled = categories_.pooled[graph_.transfers[task - graph_.num_ops()].kind];
      for (const int* at = begin; at != end; ++at) {
        take(*at, categories_.messages);
        if (pooled) receive(*at, sizes_[size_of_[*at]]);
      }
      check();
    } else if (action == kStart) {
      for (const int* at = begin; at != end; ++at) {
        if (graph_.buffers[*at].rank == rank_) take(*at);
        if (holder_[*at] == rank_) check();
      }
    } else if (action == kFree) {
      for (const int* at = begin; at != end; ++at) free(*at);
    } else if (action == kSend || !link) {
      free_all(task);
    } else {
      come(task);
    }
  }

  void come(int task) {
    const bool sums = graph_.transfers[task - graph_.num_ops()].kind == tables_.weight_gradients_sent;
    for (const int* at = graph_.writes.begin(task); at != graph_.writes.end(task); ++at) {
      const int category = categories_.of[graph_.buffers[*at].kind];
      if (sums) {
        free(*at);
      } else if (category != categories_.messages) {
        const double size = sizes_[size_of_[*at]];
        now_[category_[*at]] -= size;
        category_[*at] = static_cast<char>(category);
        now_[category] += size;
      }
    }
  }

  void take(int number, int category = -1) {
    const double size = sizes_[size_of_[number]];
    const Buffer& buffer = graph_.buffers[number];
    if (buffer.host) {
      host_ += size;
      peak_.host = std::max(peak_.host, host_);
      return;
    }
    if (category < 0) category = categories_.of[buffer.kind];
    holder_[number] = rank_;
    category_[number] = static_cast<char>(category);
    now_[category] += size;
  }

  void free(int number) {
    const double size = sizes_[size_of_[number]];
    if (holder_[number] == rank_) {
      holder_[number] = -1;
      now_[category_[number]] -= size;
      received_ -= std::exchange(part_[number], 0.0);
    } else if (graph_.buffers[number].host) {
      host_ -= size;
    }
  }

  void free_all(int task) {
    for (const int* at = graph_.frees.begin(task); at != graph_.frees.end(task); ++at) free(*at);
  }

  void check() {
    if (now_[categories_.activations] > peak_.activations) peak_.activations = now_[categories_.activations];
    double total = now_[0];
    for (int category = 1; category < categories_.count; ++category) total += now_[category];
    total -= received_;
    if (total > total_) {
      total_ = total;
      received_then_ = received_;
      peak_.most = now_;
    }
  }

  const Graph& graph_;
  const Tables& tables_;
  const Categories& categories_;
  const Figures &sizes_;
  const Numbers& size_of_;
  const Figures& workspaces_;
  const Numbers& workspace_of_;
  Numbers holder_;  // of each buffer the rank that holds it
  std::vector<char> category_;
  Figures part_;  // of the receive pool
  int rank_ = 0;
  Figures now_;
  Peak peak_;
  double total_ = 0.0, host_ = 0.0, received_ = 0.0, received_then_ = 0.0;
  Numbers given_;
};

}  // namespace

std::vector<Peak> sweep(const Graph& graph, const Streams& streams, const Categories& categories, const Figures& sizes,
                        const Numbers& size_of, const Figures& workspaces, const Numbers& workspace_of) {
  Sweep state(graph, categories, sizes, size_of, workspaces, workspace_of);
  std::vector<Peak> peaks;
  for (std::size_t rank = 0; rank < streams.tasks.size(); ++rank) {
    peaks.push_back(state.run(static_cast<int>(rank), streams.actions[rank], streams.tasks[rank]));
  }
  return peaks;
}

}  // namespace helixpipe
