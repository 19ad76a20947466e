// Preloaded, so that the tests run on Mesa 22.3's Vulkan on the CPU:
//
// - It reads all buffers of a descriptor set, those too that the shader does not use, and these may be destroyed: Vulkan
//   allows that, and ggml does it. Sooner or later the heap breaks. So buffers stay; their memory is freed as ever.
// - ggml waits in a loop for the end of a graph, on the CPU that is to compute it. So the loop sleeps.
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
#include <vulkan/vulkan.h>

static PFN_vkGetFenceStatus fence_status;

static VKAPI_ATTR void VKAPI_CALL destroy_buffer(VkDevice device, VkBuffer buffer, const VkAllocationCallbacks * with) {
    (void) device, (void) buffer, (void) with;
}

static VKAPI_ATTR VkResult VKAPI_CALL get_fence_status(VkDevice device, VkFence fence) {
    const VkResult res = fence_status(device, fence);
    if (res == VK_NOT_READY) {
        usleep(20);
    }
    return res;
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    static PFN_vkGetInstanceProcAddr next;
    if (!next) {
        next = (PFN_vkGetInstanceProcAddr) dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetInstanceProcAddr");
    }
    PFN_vkVoidFunction res = next(instance, name);
    if (res && !strcmp(name, "vkDestroyBuffer")) {
        return (PFN_vkVoidFunction) destroy_buffer;
    }
    if (res && !strcmp(name, "vkGetFenceStatus")) {
        fence_status = (PFN_vkGetFenceStatus) res;
        return (PFN_vkVoidFunction) get_fence_status;
    }
    return res;
}
